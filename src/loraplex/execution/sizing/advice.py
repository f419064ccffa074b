"""What to say when a device's memory is too small: which setting to lower, and by how much."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator

import torch

from loraplex.core.errors import ConfigError
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
"""In the texts of the driver, of Triton and of cuBLAS, which raise no type of their own."""


@contextlib.contextmanager
def out_of_memory_is(told: Callable[[], ConfigError]) -> Iterator[None]:
    """Raise what is told instead of an error that says that a device's memory is full."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise told() from error


def is_out_of_memory(error: Exception) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or any(sign in str(error) for sign in _SIGNS)


@dataclasses.dataclass(frozen=True, slots=True)
class MemoryAdvice:
    """For one model with its settings. `room`: bytes that were free for what did not fit."""

    settings: RunnerSettings
    spec: ModelSpec
    dtype: torch.dtype

    def weights(self, room: int | None) -> ConfigError:
        needed = self._weights_bytes(self.settings.precision)
        return ConfigError(
            f"the weights take {needed} bytes{_room(room)}: {self._smaller_weights(room)}",
            param="quantization",
        )

    def workspace(self, room: int | None) -> ConfigError:
        """The largest step did not run."""
        settings = self.settings
        about = estimated_step_memory(settings, self.spec, self.dtype).workspace
        share = 0.5 if room is None else min(0.5, 0.5 * max(room, 0) / about)
        num_tokens = max(1, int(settings.max_num_batched_tokens * share))
        num_seqs = max(1, int(settings.max_num_seqs * share))
        return ConfigError(
            f"the largest step, of {settings.max_num_batched_tokens} tokens and "
            f"{settings.max_num_seqs} sequences, takes about {about} bytes{_room(room)}: lower "
            f"max_num_batched_tokens to {num_tokens} and max_num_seqs to {num_seqs}, or quantize "
            "the weights",
            param="max_num_batched_tokens",
        )

    def graphs(self, room: int | None) -> ConfigError:
        """The decode steps could not be recorded."""
        sizes = graph_sizes(self.settings)
        about = estimated_step_memory(self.settings, self.spec, self.dtype).graphs
        fewer = sizes[: len(sizes) // 2]
        named = f"set cuda_graph_batch_sizes to {','.join(map(str, fewer))}, or " if fewer else ""
        return ConfigError(
            f"recording decode steps of up to {sizes[-1]} sequences takes about {about} "
            f"bytes{_room(room)}: {named}turn cuda_graphs off, or lower kv_cache_fraction",
            param="cuda_graph_batch_sizes",
        )

    def pools(self, room: int | None, kv_bytes: int, adapter_bytes: int) -> ConfigError:
        """KV cache or adapter pool could not be allocated, though they had been found to fit."""
        settings = self.settings
        said = settings.kv_cache_bytes is not None
        missing = None if room is None else kv_bytes + adapter_bytes - room
        by = f" by at least {missing} bytes" if missing is not None and missing > 0 else ""
        kv = "kv_cache_bytes" if said else f"kv_cache_fraction ({settings.kv_cache_fraction})"
        pool = (
            f"lora_device_fraction ({settings.lora_device_fraction})"
            if settings.lora_device_bytes is None
            else "lora_device_bytes"
        )
        return ConfigError(
            f"the KV cache takes {kv_bytes} bytes and the adapters' pool {adapter_bytes}"
            f"{_room(room)}: another process may have taken some meanwhile; lower {kv} or "
            f"{pool}{by}",
            param="kv_cache_bytes" if said else "kv_cache_fraction",
        )

    def no_room(self, missing: int, steps: StepMemory) -> ConfigError:
        """Weights, steps and graphs leave too little for one sequence and one adapter.

        missing: bytes that it lacks. steps: as measured, or estimated.
        """
        return ConfigError(
            f"weights, steps ({steps.workspace} bytes) and recorded steps ({steps.graphs} bytes) "
            f"leave too little for one KV block and one adapter of rank "
            f"{self.settings.max_lora_rank}, by {missing} bytes: "
            f"{'; or '.join(self._ways(missing, steps))}",
            param="max_num_batched_tokens",
        )

    def _ways(self, missing: int, steps: StepMemory) -> Iterator[str]:
        """Each of them is enough, or it is said what it gives."""
        settings = self.settings
        if steps.graphs:
            yield f"turn cuda_graphs off, which gives {steps.graphs}"
        per_token = bytes_per_token(settings, self.spec, self.dtype)
        num_tokens = settings.max_num_batched_tokens - -(-missing // per_token)
        if steps.workspace and num_tokens > 0:
            yield f"lower max_num_batched_tokens to about {num_tokens}"
        elif steps.workspace:
            yield (
                f"lower max_num_batched_tokens and max_num_seqs, which give up to {steps.workspace}"
            )
        if settings.max_lora_rank > 1:
            yield "lower max_lora_rank"
        yield self._smaller_weights(None, at_least=missing)

    def _smaller_weights(self, room: int | None, at_least: int = 0) -> str:
        present = self._weights_bytes(self.settings.precision)
        limit = present - at_least if room is None else room
        fitting = {
            precision: size
            for precision in WeightPrecision
            if (size := self._weights_bytes(precision)) < min(limit, present)
        }
        if not fitting:
            return "take a smaller model, or a device with more memory"
        choices = " or ".join(f"{precision} ({size})" for precision, size in fitting.items())
        return f"set quantization to {choices}"

    def _weights_bytes(self, precision: WeightPrecision) -> int:
        """What cannot be quantized like this is no smaller than it is."""
        try:
            return weights_size(self.spec, self.dtype, precision)
        except ConfigError:
            return weights_size(self.spec, self.dtype, WeightPrecision.NATIVE)


def _room(room: int | None) -> str:
    return "" if room is None else f", and the device has {room} free for them"
