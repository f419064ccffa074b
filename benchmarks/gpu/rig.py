"""One model of random weights on the device, driven by plans that no scheduler made.

What a row has computed before does not change how long its next step takes: a row begins at any
position, over keys and values that are zero.
"""

import dataclasses
import random
import time
from collections.abc import Sequence

import torch

from gpu.card import finish
from gpu.models import MODULES, decoder_config, random_runner
from loraplex.core.adapter import AdapterHandle, AdapterSource, LoraTarget
from loraplex.core.plan import AdapterCopy, RowAdded, RowStep, StepPlan, StepResult, Wanted
from loraplex.core.rank_limits import RankLimits
from loraplex.core.sampling_params import SamplingParams
from loraplex.core.task import Generate
from loraplex.execution.adapters.host_adapters import HostAdapter, HostAdapters, HostWeight
from loraplex.execution.sizing.settings import RunnerSettings
from loraplex.memory.adapter_pages import pages_at_ranks
from loraplex.models.spec import ModelSpec

_GREEDY = SamplingParams(temperature=0.0)
_COPY_SECONDS = 60.0
_IN_FLIGHT = 2
"""Steps that are launched before the oldest one is waited for: as the engine does with overlap."""


def start_seconds(device: torch.device) -> float:
    """Return what a rig takes to start, about: on a bare machine its kernels are compiled then."""
    return 75.0 if device.type == "cuda" else 0.0


@dataclasses.dataclass(frozen=True)
class RigSettings:
    model: str
    device: torch.device
    dtype: str
    max_num_seqs: int
    max_model_len: int
    num_kv_tokens: int
    lora_bytes: int
    max_num_batched_tokens: int = 2048
    max_rank: int = 64
    cuda_graphs: bool = True

    def runner_settings(self) -> RunnerSettings:
        return RunnerSettings(
            dtype=self.dtype,
            device=str(self.device),
            cuda_graphs=self.cuda_graphs,
            max_model_len=self.max_model_len,
            max_num_seqs=self.max_num_seqs,
            max_tokens_in_paged_kv_cache=self.num_kv_tokens,
            lora_device_bytes=self.lora_bytes,
            max_lora_rank=self.max_rank,
            max_num_batched_tokens=self.max_num_batched_tokens,
        )


class Rig:
    def __init__(self, settings: RigSettings) -> None:
        self.settings = settings
        self.device = settings.device
        self.config = decoder_config(settings.model, settings.dtype)
        self.itemsize = getattr(torch, settings.dtype).itemsize
        self.host = HostAdapters()
        self.runner = random_runner(
            self.config, settings.dtype, settings.runner_settings(), self.host
        )
        self._capacity = self.runner.capacity()
        self._num_steps = 0
        self._next_handle = 0
        self._templates: dict[tuple[int, str], HostAdapter] = {}

    def close(self) -> None:
        self.runner.close()

    def adapter(self, rank: int, modules: str) -> HostAdapter:
        """Random weights on the host: one adapter of a kind stands for all of it."""
        if (rank, modules) not in self._templates:
            targets = lora_targets(self.config, rank, modules)
            dtype = getattr(torch, self.settings.dtype)
            found = random_adapter(f"rank {rank} {modules}", targets, dtype)
            self._templates[rank, modules] = self.runner.prepare_adapter(found)
        return self._templates[rank, modules]

    def most_adapters(self, rank: int, modules: str) -> int:
        """That the pool holds."""
        return self._capacity.num_adapter_pages // self._pages(rank, modules)

    def load(self, count: int, rank: int, modules: str) -> list[AdapterHandle]:
        """So many adapters in the pool, each in pages of its own, in place of what was there."""
        pages = self._pages(rank, modules)
        handles = range(self._next_handle, self._next_handle + count)
        self._next_handle += count
        for place, handle in enumerate(handles):
            self.host[handle] = self.adapter(rank, modules)
            copy = AdapterCopy(handle, tuple(range(place * pages, (place + 1) * pages)))
            self._copy(copy)
            self.host.pop(handle, None)
        return list(handles)

    def decode(
        self, batch: int, context: int, handles: Sequence[AdapterHandle], blocks: int, steps: int
    ) -> list[float]:
        """Seconds of a step, a mean of each block of `steps` steps; one block is not counted.

        Row i uses handles[i % len]; none is the base model.
        """
        added = tuple(self._row(slot, context, handles) for slot in range(batch))
        num_steps = (1 + blocks) * steps
        last = context + num_steps
        assert last <= self._capacity.max_model_len
        seconds: list[float] = []
        under_way: list[Handle] = []
        for number in range(num_steps):
            if number % steps == 0:
                for step in under_way:
                    step.wait()
                under_way.clear()
                finish(self.device)
                start = time.perf_counter()
            rows = tuple(
                self._decode_row(slot, context - 1 + number, last) for slot in range(batch)
            )
            if number == 0:
                rows = tuple(self._first_row(slot, context, last) for slot in range(batch))
            under_way.append(self._launch(added=added if number == 0 else (), rows=rows))
            if len(under_way) >= _IN_FLIGHT:
                under_way.pop(0).wait()
            if number % steps == steps - 1:
                for step in under_way:
                    step.wait()
                under_way.clear()
                finish(self.device)
                seconds.append((time.perf_counter() - start) / steps)
        self._launch(removed=tuple(range(batch))).wait()
        return seconds[1:]

    def prefill(self, lengths: Sequence[int], handles: Sequence[AdapterHandle]) -> float:
        """Seconds of one step that computes whole prompts side by side."""
        added = tuple(self._row(slot, length, handles) for slot, length in enumerate(lengths))
        rows, first = [], 0
        for slot, length in enumerate(lengths):
            blocks = self._blocks(length)
            ids = tuple(range(first, first + blocks))
            first += blocks
            tokens = added[slot].token_ids
            rows.append(RowStep(slot, 0, length, tokens, new_block_ids=(ids,), wanted=Wanted.LAST))
        finish(self.device)
        start = time.perf_counter()
        self._launch(added=added, rows=tuple(rows)).wait()
        finish(self.device)
        seconds = time.perf_counter() - start
        self._launch(removed=tuple(range(len(lengths)))).wait()
        return seconds

    def _row(self, slot: int, length: int, handles: Sequence[AdapterHandle]) -> RowAdded:
        draws = random.Random(slot)
        return RowAdded(
            slot=slot,
            sequence_id=slot,
            task=Generate(_GREEDY),
            sequence_index=0,
            token_ids=tuple(draws.choices(range(self.config.vocab_size), k=length)),
            num_prompt_tokens=length,
            adapters=((handles[slot % len(handles)], 1.0),) if handles else (),
        )

    def _first_row(self, slot: int, context: int, last: int) -> RowStep:
        """It has all the blocks that the row will ever need."""
        blocks = self._blocks(last)
        ids = tuple(range(slot * blocks, (slot + 1) * blocks))
        return RowStep(slot, context - 1, 1, (slot,), new_block_ids=(ids,), wanted=Wanted.LAST)

    def _decode_row(self, slot: int, start: int, _last: int) -> RowStep:
        return RowStep(slot, start, 1, None, wanted=Wanted.LAST)

    def _blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._capacity.block_size)

    def _pages(self, rank: int, modules: str) -> int:
        targets = lora_targets(self.config, rank, modules)
        return pages_at_ranks(targets, RankLimits(rank), self._capacity.page_geometry)

    def _copy(self, copy: AdapterCopy) -> None:
        result = self._launch(adapter_copies=(copy,)).wait()
        deadline = time.monotonic() + _COPY_SECONDS
        while copy.handle not in result.copies_done:
            assert not result.copies_failed, result.copies_failed
            assert time.monotonic() < deadline, "the copy of an adapter does not end"
            result = self._launch().wait()

    def _launch(self, **plan: object) -> "Handle":
        self._num_steps += 1
        return Handle(self.runner.launch(StepPlan(self._num_steps, **plan)))  # type: ignore[arg-type]


class Handle:
    """A step that was launched; what went wrong with a row is raised."""

    def __init__(self, step: object) -> None:
        self._step = step

    def wait(self) -> StepResult:
        result: StepResult = self._step.wait()  # type: ignore[attr-defined]
        for row in result.rows:
            assert row.error is None, row.error
        return result


def lora_targets(config: ModelSpec, rank: int, modules: str) -> tuple[LoraTarget, ...]:
    return tuple(
        sorted(
            LoraTarget(layer, module, rank, *shapes[module])
            for layer, shapes in enumerate(config.module_shapes)
            for module in MODULES[modules]
            if module in shapes
        )
    )


def random_adapter(digest: str, targets: Sequence[LoraTarget], dtype: torch.dtype) -> HostAdapter:
    draws = torch.Generator().manual_seed(0)
    weights = tuple(
        HostWeight(
            target,
            (torch.randn(target.rank, target.in_features, generator=draws) / 100).to(dtype),
            (torch.randn(target.out_features, target.rank, generator=draws) / 100).to(dtype),
            1.0,
        )
        for target in targets
    )
    return HostAdapter(digest, weights)


def adapter_source(config: ModelSpec, digest: str, rank: int, modules: str) -> AdapterSource:
    targets = lora_targets(config, rank, modules)
    num_bytes = sum(target.num_elements for target in targets) * 2
    return AdapterSource(digest, "", num_bytes, targets)
