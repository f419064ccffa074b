"""A device whose memory is too small: which setting to lower, by how much, and which row gives way.

A step that is too large for what is left of the memory costs a row, not the server.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch

from loraplex.core.byte_sizes import enough_bytes, readable_bytes
from loraplex.core.errors import ConfigError, ErrorInfo, RowFailedError
from loraplex.core.weight_precision import WeightPrecision
from loraplex.execution.sizing.settings import RunnerSettings
from loraplex.execution.sizing.step_memory import (
    StepMemory,
    bytes_per_token,
    estimated_step_memory,
    graph_sizes,
)
from loraplex.execution.weights.size import weights_size
from loraplex.models.spec import ModelSpec

_MIB = 1 << 20
_SIGNS = ("out of memory", "ALLOC_FAILED")
"""Parts of the messages of the driver, Triton and cuBLAS, which have no exception type for it."""


@contextlib.contextmanager
def out_of_memory_is(describe: Callable[[], ConfigError]) -> Iterator[None]:
    """Raise the described error in place of one for a full device memory."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise describe() from error


def is_out_of_memory(error: Exception) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or any(sign in str(error) for sign in _SIGNS)


@dataclasses.dataclass(frozen=True, slots=True)
class MemoryAdvice:
    """Errors for one model with its settings. `free`: bytes that were free for what failed."""

    settings: RunnerSettings
    spec: ModelSpec
    dtype: torch.dtype

    def weights(self, free: int | None) -> ConfigError:
        needed = self._weights_bytes(self.settings.precision)
        return ConfigError(
            f"the weights take {readable_bytes(needed)}{_and_free(free)}: "
            f"{self._smaller_weights(free)}",
            param="quantization",
        )

    def limit(self, weights_bytes: int, memory_bytes: int) -> ConfigError:
        """Return the error for a memory_bytes that does not hold the weights."""
        return ConfigError(
            f"the weights take {readable_bytes(weights_bytes)}, and memory_bytes is "
            f"{readable_bytes(memory_bytes)}: raise --memory, or {self._smaller_weights(None)}",
            param="memory_bytes",
        )

    def workspace(self, free: int | None) -> ConfigError:
        """Return the error for a largest step that did not run."""
        settings = self.settings
        about = estimated_step_memory(settings, self.spec, self.dtype).workspace
        share = 0.5 if free is None else min(0.5, 0.5 * max(free, 0) / about)
        num_tokens = max(1, int(settings.max_num_batched_tokens * share))
        num_seqs = max(1, int(settings.max_num_seqs * share))
        return ConfigError(
            f"the largest step, of {settings.max_num_batched_tokens} tokens and "
            f"{settings.max_num_seqs} sequences, takes about {readable_bytes(about)}"
            f"{_and_free(free)}: lower max_num_batched_tokens to {num_tokens} and max_num_seqs to "
            f"{num_seqs}, or quantize the weights",
            param="max_num_batched_tokens",
        )

    def graphs(self, free: int | None) -> ConfigError:
        """Return the error for decode steps that could not be recorded."""
        sizes = graph_sizes(self.settings)
        about = estimated_step_memory(self.settings, self.spec, self.dtype).graphs
        fewer = sizes[: len(sizes) // 2]
        named = f"set cuda_graph_batch_sizes to {','.join(map(str, fewer))}, or " if fewer else ""
        return ConfigError(
            f"recording decode steps of up to {sizes[-1]} sequences takes about "
            f"{readable_bytes(about)}{_and_free(free)}: {named}turn cuda_graphs off, or "
            "lower kv_cache_fraction",
            param="cuda_graph_batch_sizes",
        )

    def pools(self, free: int | None, kv_bytes: int, adapter_bytes: int) -> ConfigError:
        """Return the error for a KV cache or adapter pool whose allocation failed unexpectedly."""
        settings = self.settings
        said = settings.kv_cache_bytes is not None
        missing = None if free is None else kv_bytes + adapter_bytes - free
        by = f" by at least {enough_bytes(missing)}" if missing is not None and missing > 0 else ""
        kv = "kv_cache_bytes" if said else f"kv_cache_fraction ({settings.kv_cache_fraction})"
        pool = (
            f"lora_device_fraction ({settings.lora_device_fraction})"
            if settings.lora_device_bytes is None
            else "lora_device_bytes"
        )
        return ConfigError(
            f"the KV cache takes {readable_bytes(kv_bytes)} and the adapters' pool "
            f"{readable_bytes(adapter_bytes)}"
            f"{_and_free(free)}: another process may have taken some meanwhile; lower {kv} or "
            f"{pool}{by}",
            param="kv_cache_bytes" if said else "kv_cache_fraction",
        )

    def too_small(self, missing: int, steps: StepMemory) -> ConfigError:
        """Return the error for memory that does not hold one sequence and one adapter.

        missing: bytes that it lacks. steps: as measured, or estimated.
        """
        return ConfigError(
            f"weights, steps ({readable_bytes(steps.workspace)}) and recorded steps "
            f"({readable_bytes(steps.graphs)}) "
            f"leave too little for one KV block and one adapter of rank "
            f"{self.settings.rank_limits}, by {readable_bytes(missing)}: "
            f"{'; or '.join(self._ways(missing, steps))}",
            param="max_num_batched_tokens",
        )

    def _ways(self, missing: int, steps: StepMemory) -> Iterator[str]:
        """Yield changes of settings; each is sufficient, or its text contains what it saves."""
        settings = self.settings
        if steps.graphs:
            yield f"turn cuda_graphs off, which frees {readable_bytes(steps.graphs)}"
        per_token = bytes_per_token(settings, self.spec, self.dtype)
        num_tokens = settings.max_num_batched_tokens - -(-missing // per_token)
        if steps.workspace and num_tokens > 0:
            yield f"lower max_num_batched_tokens to about {num_tokens}"
        elif steps.workspace:
            yield (
                "lower max_num_batched_tokens and max_num_seqs, which frees up to "
                f"{readable_bytes(steps.workspace)}"
            )
        if settings.rank_limits.largest > 1:
            yield "lower max_lora_rank, or max_lora_ranks"
        yield self._smaller_weights(None, at_least=missing)

    def _smaller_weights(self, free: int | None, at_least: int = 0) -> str:
        present = self._weights_bytes(self.settings.precision)
        limit = present - at_least if free is None else free
        fitting = {
            precision: size
            for precision in WeightPrecision
            if (size := self._weights_bytes(precision)) < min(limit, present)
        }
        if not fitting:
            return "use a smaller model, or a device with more memory"
        choices = " or ".join(
            f"{precision} ({readable_bytes(size)})" for precision, size in fitting.items()
        )
        return f"set quantization to {choices}"

    def _weights_bytes(self, precision: WeightPrecision) -> int:
        """Return the size; weights that cannot be quantised like this keep their type."""
        try:
            return weights_size(self.spec, self.dtype, precision)
        except ConfigError:
            native = WeightPrecision.NATIVE
            return weights_size(self.spec, self.dtype, native)


def _and_free(free: int | None) -> str:
    return "" if free is None else f", and the device has {readable_bytes(free)} free for them"


_T = TypeVar("_T")


class RowsThatFit:
    """Those of one step. First they are tried again with all that can be freed, then the largest
    one gives way, and so on.
    """

    def __init__(
        self, num_tokens: Sequence[int], trim: Callable[[], None], *, is_alone: bool = True
    ) -> None:
        """num_tokens: that each row computes. trim: gives cached memory of the device back.

        is_alone: False for one rank of several, which cannot try again by itself.
        """
        self._num_tokens = num_tokens
        self._is_alone = is_alone
        self._trim = trim
        self._was_tried_again = False
        self.rows = list(range(len(num_tokens)))
        self.lost: dict[int, ErrorInfo] = {}
        """Errors of the other rows."""

    def attempt(self, compute: Callable[[Sequence[int]], _T]) -> _T | None:
        """compute(rows) with as many of the rows as there is memory for; None if there are none."""
        while self.rows:
            try:
                return compute(self.rows)
            except Exception as error:
                if not (self._is_alone and is_out_of_memory(error)):
                    raise
            # Not in the clause: the exception keeps what the step had allocated so far.
            self.give_way()
        return None

    def give_way(self) -> None:
        """There was not enough memory for them."""
        self._trim()
        if not self._was_tried_again:
            self._was_tried_again = True
            return
        largest = max(self.rows, key=self._num_tokens.__getitem__)
        self.rows.remove(largest)
        self.lost[largest] = _out_of_memory(self._num_tokens[largest])


def _out_of_memory(num_tokens: int) -> ErrorInfo:
    return RowFailedError(
        f"the device is out of memory for a step with {num_tokens} tokens of this request: the "
        "server needs a lower max_num_batched_tokens, max_prefill_chunk or kv_cache_fraction; the "
        "request needs less without prompt_logprobs and returned logits"
    ).to_info()
