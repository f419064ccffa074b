"""Steps of a small model with random weights, in the shapes of the served one.

It has the served model's first layers, up to the last one of a kind that no layer before has. Its
steps compute prompts, decode, and mix both, with adapters and without, so that they call what a
server calls. What they compute has no meaning.
"""

import dataclasses
import functools
import itertools
import random
import re
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import torch

from loraplex.core.adapter import AdapterHandle, each_expert
from loraplex.core.errors import StepFailedError
from loraplex.core.plan import (
    NO_BLOCK,
    AdapterCopy,
    BlockId,
    Capacity,
    EncodeText,
    RowAdded,
    RowStep,
    Slot,
    StepPlan,
    StepResult,
    Wanted,
)
from loraplex.core.rank_limits import RankLimits
from loraplex.core.sampling_params import SamplingParams
from loraplex.core.task import Generate, Pool
from loraplex.core.weight_precision import WeightPrecision
from loraplex.execution.adapters.host_adapters import HostAdapter, HostAdapters, HostWeight
from loraplex.execution.assembly import Assembly
from loraplex.execution.checking.stored_forms import stored_forms
from loraplex.execution.sizing.capacity import MemorySize, choose_dtype, smallest_pool
from loraplex.execution.sizing.kv import size_kv
from loraplex.execution.sizing.settings import RunnerSettings
from loraplex.execution.steps.model_runner import ModelRunner
from loraplex.execution.weights.packing import WeightFormat
from loraplex.execution.weights.size import stored_bits
from loraplex.kernels.accelerator import Accelerator
from loraplex.kernels.ops import Kernels, PackedLinear
from loraplex.kernels.quantization import StoredNumbers
from loraplex.kernels.sampling import DrawOptions
from loraplex.memory.adapter_pages import layer_targets
from loraplex.memory.cache_policy import cache_policy
from loraplex.models.parameters import LinearPlace, build_parameters
from loraplex.models.spec import LayerSpec, ModelSpec
from loraplex.models.stored_format import StoredFormat, StoredMethod

_PROMPTS = (300, 61, 21, 1)
"""Tokens of the prompts of a step. The first is cut into many pieces, the second passes the border
of a chunk soon."""
_LATE_PROMPT = 5
"""Tokens of a prompt next to rows that decode."""
_SHORT_PROMPT = 40
"""Tokens of a prompt that leave a step with fewer than 64, with the rows that decode."""
_NUM_DECODES = 4
_COPY_SECONDS = 60.0
_SPREAD = 0.05
_NUM_DRAWS = 32
_NATIVE: Final = WeightPrecision.NATIVE
_GREEDY: Final = Generate(SamplingParams(temperature=0.0))


class TrialSize(NamedTuple):
    """Size of a trial's steps."""

    num_rows: int
    num_tokens: int
    """Tokens of a step."""
    max_model_len: int


CHECKED: Final = TrialSize(len(_PROMPTS) + 1, sum(_PROMPTS), 512)
MEASURED: Final = TrialSize(8 + 2, 1088, 1088)
"""Rows that decode, a short prompt next to them, and a long one."""


def trial_settings(
    settings: RunnerSettings, spec: ModelSpec, size: TrialSize = CHECKED
) -> RunnerSettings:
    """Return the settings of a server with steps of the trial's size."""
    num_rows, num_tokens, max_model_len = size
    max_model_len = min(
        max_model_len, settings.max_model_len or max_model_len, spec.default_max_model_len
    )
    return msgspec.structs.replace(
        settings,
        max_num_seqs=num_rows,
        max_num_batched_tokens=num_tokens,
        max_model_len=max_model_len,
        num_blocks=num_rows * -(-max_model_len // settings.block_size),
        max_tokens_in_paged_kv_cache=None,
        kv_cache_host_memory_bytes=0,
        cuda_graph_batch_sizes=(1, len(_PROMPTS)),
        memory_bytes=None,
        lora_device_bytes=None,
        logits_dir=None,
    )


def first_layers(spec: ModelSpec) -> ModelSpec:
    """Return the model with as few of its first layers as have all kinds of layers.

    Those of an encoder likewise.
    """
    encoder = spec.encoder
    if encoder is not None:
        encoder = dataclasses.replace(encoder, layers=_first_layers(encoder.layers))
    return dataclasses.replace(spec, layers=_first_layers(spec.layers), encoder=encoder)


def _first_layers(layers: tuple[LayerSpec, ...]) -> tuple[LayerSpec, ...]:
    kinds = [_kind(layer, index) for index, layer in enumerate(layers)]
    last = max(map(kinds.index, set(kinds)), default=-1)
    return layers[: last + 1]


def _kind(layer: LayerSpec, index: int) -> str:
    """Return all of a layer but its number, which names of weights contain."""
    return re.sub(rf"\b{index}\.", "", repr(layer))


@dataclasses.dataclass
class RandomParameters:
    """Implements models.parameters.ParameterSource."""

    kernels: Kernels
    form: WeightFormat
    stored: StoredFormat | None = None
    """Format of a checkpoint that is quantised: its forms of weights take turns."""
    _is_first: bool = True
    _num_stored: int = 0

    def tensor(
        self, name: str, shape: tuple[int, ...], num_rows: int | None = None
    ) -> torch.Tensor:
        del name
        shape = shape if num_rows is None else (num_rows, *shape[1:])
        # What is divided by, such as the weight of a norm, is about 1.
        return self._random(shape) + (1 if len(shape) == 1 else 0)

    def linear(self, place: LinearPlace) -> PackedLinear:
        if place.is_embedding and not (place.is_lm_head and self.form.precision is _NATIVE):
            return None
        experts = () if place.num_experts is None else (place.num_experts,)
        weight = self._weight(place, (*experts, *place.shape))
        bias = self._random((*experts, place.shape[0])) if place.has_bias else None
        precision = self.form.precision_of(place)
        packed = self.kernels.pack_linear(weight, bias, precision, place.num_blocks)
        # As the next start reads it from the weights cache.
        packed = self.kernels.join_linear(self.kernels.linear_parts(packed))
        if self._is_first and not experts:
            self._is_first = False
            self._use_apart(packed, place.shape[1])
        return packed

    def _weight(self, place: LinearPlace, shape: tuple[int, ...]) -> torch.Tensor | StoredNumbers:
        """Return random numbers, as the served checkpoint would give them to the kernels."""
        stored = self.stored
        forms = () if stored is None else stored_forms(stored)
        if stored is None or not forms or stored_bits(stored, place, self.form.dtype) is None:
            return self._random(shape)
        form = forms[self._num_stored % len(forms)]
        self._num_stored += 1
        weight = form.random(shape, self.form.device)
        if self.kernels.takes_quantized(weight, place.num_blocks):
            return weight
        return weight.dequantized().to(self.form.dtype)

    def _use_apart(self, packed: PackedLinear, in_features: int) -> None:
        """Call what only the loading of adapters calls."""
        self.kernels.squared_row_norms(packed)
        self.kernels.linear_apart(self._random((3, in_features)).float(), packed, self.form.dtype)

    def _random(self, shape: tuple[int, ...]) -> torch.Tensor:
        form = self.form
        return torch.empty(shape, dtype=form.dtype, device=form.device).normal_(0, _SPREAD)


class Trial:
    """A small runner, and what its steps need."""

    def __init__(
        self,
        spec: ModelSpec,
        settings: RunnerSettings,
        kernels: Kernels,
        accelerator: Accelerator | None,
        size: TrialSize = CHECKED,
    ) -> None:
        """spec: the result of sizing.kv.windowed. settings: those of the server."""
        torch.manual_seed(0)
        spec, settings = first_layers(spec), trial_settings(settings, spec, size)
        device = torch.device(settings.device) if accelerator is None else accelerator.device
        form = WeightFormat(
            dtype=choose_dtype(settings, spec),
            precision=settings.precision,
            device=device,
        )
        with torch.inference_mode():
            source = RandomParameters(kernels, form, spec.stored_format)
            parameters = build_parameters(spec, source)
        self._assembly = Assembly(
            spec=spec,
            parameters=parameters,
            weights_bytes=0,
            settings=settings,
            kernels=kernels,
            accelerator=accelerator,
        )
        memory = MemorySize(
            size_kv(settings, spec, self._assembly.kv_dtype),
            smallest_pool(settings, spec, form.dtype),
        )
        self._host_adapters = HostAdapters()
        self._parts = self._assembly.parts(memory, self._host_adapters)
        self._num_steps = 0

    def close(self) -> None:
        self._parts.sampler.close()

    def run(self, *, records: bool) -> None:
        """Compute prompts and decode. records: steps that only decode, where a backend can.

        Raises StepFailedError if the server would fail the row.
        """
        sizes = self._assembly.recorded_sizes if records else ()
        runner = ModelRunner(dataclasses.replace(self._parts, recorded_sizes=sizes))
        runner.record_steps()
        uses = [((handle, 1.0),) for handle in self._copied_adapters(runner)]
        both = tuple(itertools.chain(*uses))
        rows = _Rows(runner.capacity())
        longest = runner.capacity().max_model_len - _NUM_DECODES - 1
        adapters = [*uses, both, ()]
        added = [
            rows.added(min(length, longest), adapters[index % len(adapters)])
            for index, length in enumerate(_PROMPTS)
        ]
        self._launch(runner, added=tuple(added), rows=rows.steps(added), encodes=_encoded(added))
        if rows.generates:
            for _ in range(_NUM_DECODES):
                self._launch(runner, rows=rows.steps(()))
            late = rows.added(_LATE_PROMPT, both)
            self._launch(runner, added=(late,), rows=rows.steps((late,)), encodes=_encoded((late,)))
        self._launch(runner, removed=tuple(rows.lengths))
        runner.forget_steps()

    def measure(self, measuring: Callable[[str], AbstractContextManager[None]]) -> None:
        """Compute the steps whose programs have sizes to choose from. The trial is of MEASURED.

        measuring: receives the name of each kind of step, once.
        """
        runner = ModelRunner(dataclasses.replace(self._parts, recorded_sizes=()))
        uses = [*(((handle, 1.0),) for handle in self._copied_adapters(runner)), ()]
        rows = _Rows(runner.capacity())
        max_model_len = runner.capacity().max_model_len
        short = min(_SHORT_PROMPT, max_model_len // 4)

        def add(length: int, *, alone: bool) -> None:
            added = (rows.added(length, uses[len(rows.lengths) % len(uses)]),)
            steps = rows.steps(added, alone=alone)
            self._launch(runner, added=added, rows=steps, encodes=_encoded(added))

        if rows.generates:
            for _ in range(MEASURED.num_rows - 2):
                add(max_model_len - short, alone=True)
            with measuring("decode"):
                self._launch(runner, rows=rows.steps(()))
            with measuring("short prompt"):
                add(short, alone=False)
        with measuring("long prompt"):
            add(max_model_len - short, alone=True)
        self._launch(runner, removed=tuple(rows.lengths))

    def sample(self) -> None:
        """Call the ops of the sampler, as rows with all its options do."""
        kernels, device = self._assembly.kernels, self._assembly.device
        vocab_size = self._assembly.spec.vocab_size
        rows, draws = np.arange(_NUM_DRAWS), np.random.default_rng(0)
        with torch.inference_mode():
            logits = torch.randn(_NUM_DRAWS, vocab_size, device=device) * 3
            options = DrawOptions(
                np.full(_NUM_DRAWS, 0.8, np.float32),
                np.where(rows % 2, 40, 0),
                np.where(rows % 4 < 2, 0.9, 1.0),
                np.where(rows % 8 < 4, 0.02, 0.0),
                draws.random(_NUM_DRAWS),
            )
            kernels.argmax(logits, rows)
            kernels.draw_tokens(logits, rows, options)
            kernels.top_logprobs(logits, rows, draws.integers(0, vocab_size, _NUM_DRAWS), 5)
            words = draws.integers(-(2**31), 2**31, (_NUM_DRAWS, -(-vocab_size // 32)))
            kernels.apply_bitmask(logits, rows, torch.from_numpy(words).int().to(device))

    def _copied_adapters(self, runner: ModelRunner) -> list[AdapterHandle]:
        """Return adapters of different ranks, copied: as many of two as the pool holds."""
        settings, handles, first_page = self._assembly.settings, [], 0
        for handle, divisor in enumerate((2, 4)):
            limits = settings.rank_limits
            by_kind = {kind: max(1, rank // divisor) for kind, rank in limits.by_kind.items()}
            adapter = self._adapter(RankLimits(max(1, limits.rank // divisor), by_kind))
            made = self._parts.adapter_bank.prepare(adapter)
            assert made.layout is not None, "it was prepared"
            end = first_page + made.layout.placement.num_pages
            if end > runner.capacity().num_adapter_pages:
                break
            self._host_adapters[handle] = made
            self._copy(runner, AdapterCopy(handle, tuple(range(first_page, end))))
            handles.append(handle)
            first_page = end
        return handles

    def _adapter(self, ranks: RankLimits) -> HostAdapter:
        spec, dtype = self._assembly.spec, self._assembly.dtype
        targets = layer_targets(spec.module_shapes, ranks, spec.num_experts)

        @functools.cache
        def random_matrix(rows: int, columns: int) -> torch.Tensor:
            return torch.randn(rows, columns).mul_(_SPREAD).to(dtype)

        weights = tuple(
            HostWeight(
                target,
                random_matrix(target.rank, target.in_features),
                random_matrix(target.out_features, target.rank),
                scale=1.0,
            )
            for target in each_expert(targets)
        )
        return HostAdapter("trial", weights)

    def _copy(self, runner: ModelRunner, copy: AdapterCopy) -> None:
        result = self._launch(runner, adapter_copies=(copy,))
        deadline = time.monotonic() + _COPY_SECONDS
        while copy.handle not in result.copies_done:
            if result.copies_failed or time.monotonic() > deadline:
                raise StepFailedError(f"an adapter could not be copied: {result.copies_failed}")
            result = self._launch(runner)

    def _launch(self, runner: ModelRunner, **plan: Any) -> StepResult:
        self._num_steps += 1
        result = runner.launch(StepPlan(self._num_steps, **plan)).wait()
        for row in result.rows:
            if row.error is not None:
                raise StepFailedError(row.error.message)
        return result


def _encoded(added: Sequence[RowAdded]) -> tuple[EncodeText, ...]:
    """Return what a step encodes for its new rows."""
    return tuple(EncodeText(row.slot) for row in added if row.encoder_token_ids)


class _Rows:
    """Rows that keep their blocks. With an encoder an input is as long as the row's prompt."""

    def __init__(self, capacity: Capacity) -> None:
        self.generates = capacity.generates
        self.lengths: dict[Slot, int] = {}
        """Computed tokens of each row."""
        self._vocab_size = capacity.vocab_size
        self._longest_input = capacity.longest_encoder_input
        self._input_lengths: dict[Slot, int] = {}
        self._policies = [
            cache_policy(group.spec, capacity.block_size) for group in capacity.cache_groups
        ]
        self._num_taken = [0] * len(self._policies)
        """Blocks of each group."""
        self._draws = random.Random(0)

    def added(self, length: int, adapters: tuple[tuple[AdapterHandle, float], ...]) -> RowAdded:
        slot = len(self.lengths)
        self.lengths[slot] = 0
        self._input_lengths[slot] = min(length, self._longest_input)
        return RowAdded(
            slot=slot,
            sequence_id=slot,
            task=_GREEDY if self.generates else Pool(),
            sequence_index=0,
            token_ids=self._tokens(length),
            num_prompt_tokens=length,
            adapters=adapters,
            encoder_token_ids=self._tokens(self._input_lengths[slot]),
        )

    def _tokens(self, count: int) -> tuple[int, ...]:
        return tuple(self._draws.choices(range(self._vocab_size), k=count))

    def steps(self, added: Sequence[RowAdded], *, alone: bool = False) -> tuple[RowStep, ...]:
        """Return a step of all rows: whole prompts of the new ones, one token of the others.

        alone: of the new ones only.
        """
        prompts = {row.slot: row.token_ids for row in added}
        slots = prompts if alone else self.lengths
        return tuple(self._step(slot, prompts.get(slot)) for slot in slots)

    def _step(self, slot: Slot, prompt: tuple[int, ...] | None) -> RowStep:
        start, num_tokens = self.lengths[slot], 1 if prompt is None else len(prompt)
        self.lengths[slot] += num_tokens
        return RowStep(
            slot,
            start,
            num_tokens,
            prompt,
            new_block_ids=tuple(
                self._blocks(group, slot, start, start + num_tokens)
                for group in range(len(self._policies))
            ),
            wanted=Wanted.LAST if self.generates else Wanted.POOL,
        )

    def _blocks(self, group: int, slot: Slot, start: int, end: int) -> tuple[BlockId, ...]:
        """Take the blocks of positions that a row begins; of states the last one alone.

        Those of an encoder's positions are taken at once.
        """
        policy = self._policies[group]
        if policy.is_of_encoder:
            end = 0 if start else self._input_lengths[slot]
        indices = sorted(set(policy.takes(0, end)) - set(policy.takes(0, start)))
        if not indices:
            return ()
        num_gaps = len(indices) - 1 if policy.is_sparse else 0
        first = self._num_taken[group]
        self._num_taken[group] += len(indices) - num_gaps
        return (NO_BLOCK,) * num_gaps + tuple(range(first, self._num_taken[group]))


def is_quantized(settings: RunnerSettings, spec: ModelSpec) -> bool:
    return spec.stored_format is not None or settings.precision is not _NATIVE


def checked_weights(settings: RunnerSettings, spec: ModelSpec) -> str:
    """Return the forms of weights that a trial has."""
    stored = spec.stored_format
    if stored is None:
        return settings.precision.value
    forms = ", ".join(map(str, stored_forms(stored)))
    return f"{stored.method}: {forms or 'widened'}"


def left_out(settings: RunnerSettings, spec: ModelSpec) -> tuple[str, ...]:
    """Return what a server with this model does that no trial does, by name."""
    stored = spec.stored_format
    names = {
        "exchanges between ranks": settings.tensor_parallel_size > 1,
        "exchanges between stages": settings.pipeline_parallel_size > 1,
        "Dense modules after the pooling": bool(spec.vector_layers),
        "blocks of GGUF as they lie in the file": settings.device == "cpu"
        and stored is not None
        and stored.method is StoredMethod.GGUF,
        "DoRA and biases of adapters": True,
    }
    return tuple(name for name, is_left_out in names.items() if is_left_out)
