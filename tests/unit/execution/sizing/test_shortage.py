"""A step without memory costs a row, and the others get what they would have got."""

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from loraplex.core.plan import RowAdded, RowResult, RowStep, StepPlan
from loraplex.core.sampling_params import SamplingParams
from loraplex.core.task import Generate
from loraplex.execution.adapters.host_adapters import HostAdapters
from loraplex.execution.sizing.settings import RunnerSettings
from loraplex.execution.sizing.shortage import RowsThatFit
from loraplex.execution.steps.model_runner import ModelRunner
from loraplex.execution.steps.runner_parts import RunnerParts
from loraplex.kernels.accelerator import HostAccelerator
from loraplex.kernels.ops import Storage
from loraplex.kernels.reference import ReferenceKernels
from loraplex.models.batch import ForwardBatch
from support.accelerated_reference import AcceleratedReference, load_parts_with
from support.naming import naming
from support.tiny_model import TinyCheckpoint

SETTINGS = RunnerSettings(block_size=4, num_blocks=60, max_num_seqs=8, cuda_graph_batch_sizes=(4,))
SIZES = (4, 20, 9, 20)
SAMPLINGS = {
    "greedy": SamplingParams(temperature=0.0),
    "random": SamplingParams(temperature=1.0, top_k=20),
    "penalties": SamplingParams(temperature=1.0, repetition_penalty=1.2, presence_penalty=0.5),
}


class TrimmedAccelerator(HostAccelerator):
    num_trims = 0

    def trim(self) -> None:
        self.num_trims += 1


class SmallMemory:
    """Memory of a decoder, or a sampler's op: larger requests fail."""

    def __init__(self, most: int, grows_to: int | None = None) -> None:
        self.most, self._grows_to = most, grows_to
        self.requested: list[int] = []

    def request(self, amount: int) -> None:
        self.requested.append(amount)
        if amount > self.most:
            self.most = self._grows_to or self.most
            raise torch.OutOfMemoryError("CUDA out of memory.")


class SmallDecoder:
    def __init__(self, decoder: Any, memory: SmallMemory) -> None:
        self._decoder, self._memory = decoder, memory
        self.spec = decoder.spec

    def forward(
        self, batch: ForwardBatch, kv: tuple[Storage, ...], hidden: torch.Tensor | None
    ) -> torch.Tensor:
        self._memory.request(len(batch.token_ids))
        logits: torch.Tensor = self._decoder.forward(batch, kv, hidden)
        return logits


@pytest.fixture(params=["accelerator", "host"])
def parts(request: pytest.FixtureRequest, tiny_checkpoint: TinyCheckpoint) -> RunnerParts:
    folder, host_adapters = tiny_checkpoint.save(), HostAdapters()
    if request.param == "host":
        kernels = ReferenceKernels(torch.device("cpu"))
        return load_parts_with(kernels, None, folder, SETTINGS, host_adapters)
    accelerator = TrimmedAccelerator()
    accelerated = AcceleratedReference(accelerator)
    return load_parts_with(accelerated, accelerator, folder, SETTINGS, host_adapters)


def start(runner: ModelRunner, sampling: SamplingParams) -> tuple[RowResult, ...]:
    """The first step of all rows."""
    added, rows = [], []
    for slot, size in enumerate(SIZES):
        token_ids = tuple(range(3 + slot, 3 + slot + size))
        added.append(
            RowAdded(
                slot,
                slot,
                Generate(sampling, seed=slot),
                0,
                token_ids,
                size,
            )
        )
        blocks = tuple(range(6 * slot, 6 * slot + 6))
        rows.append(RowStep(slot, 0, size, token_ids=token_ids, new_block_ids=(blocks,)))
    return runner.launch(StepPlan(1, added=tuple(added), rows=tuple(rows))).wait().rows


def go_on(runner: ModelRunner, slots: Sequence[int]) -> tuple[RowResult, ...]:
    rows = tuple(RowStep(slot, SIZES[slot], 1) for slot in slots)
    removed = tuple({0, 1, 2, 3} - set(slots))
    return runner.launch(StepPlan(2, removed=removed, rows=rows)).wait().rows


def end(runner: ModelRunner) -> None:
    runner.launch(StepPlan(3, removed=(0, 1, 2, 3))).wait()


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_the_largest_rows_give_way(parts: RunnerParts, sampling: SamplingParams) -> None:
    whole = ModelRunner(parts)
    expected = (*start(whole, sampling), *go_on(whole, (0, 2)))
    end(whole)
    memory, trims = SmallMemory(15), getattr(parts.accelerator, "num_trims", 0)
    decoder: Any = SmallDecoder(parts.decoder, memory)
    runner = ModelRunner(dataclasses.replace(parts, decoder=decoder))
    results = start(runner, sampling)
    assert memory.requested == [53, 53, 33, 13]
    assert [result.slot for result in results] == [0, 1, 2, 3]
    for slot in (1, 3):
        error = results[slot].error
        assert error is not None
        assert error.code == "row_failed"
        assert re.search(naming(20, "max_num_batched_tokens", "max_prefill_chunk"), error.message)
        assert "max_num_batched_tokens" in error.message
    assert (results[0], results[2]) == (expected[0], expected[2])
    assert go_on(runner, (0, 2)) == expected[4:]
    if isinstance(parts.accelerator, TrimmedAccelerator):
        assert parts.accelerator.num_trims == trims + 3


def test_what_trimming_frees_may_be_enough(parts: RunnerParts) -> None:
    whole = ModelRunner(parts)
    expected = start(whole, SAMPLINGS["random"])
    end(whole)
    decoder: Any = SmallDecoder(parts.decoder, SmallMemory(15, grows_to=100))
    assert start(ModelRunner(dataclasses.replace(parts, decoder=decoder)), SAMPLINGS["random"]) == (
        expected
    )


def test_nothing_fits(parts: RunnerParts) -> None:
    decoder: Any = SmallDecoder(parts.decoder, SmallMemory(0))
    results = start(ModelRunner(dataclasses.replace(parts, decoder=decoder)), SAMPLINGS["greedy"])
    assert all(result.error is not None for result in results)


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("op", ["argmax", "draw_tokens"])
def test_a_sampler_without_memory_draws_the_same_tokens_later(
    parts: RunnerParts, sampling: SamplingParams, op: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = ModelRunner(parts)
    expected = (*start(whole, sampling), *go_on(whole, (0, 1, 2, 3)))
    end(whole)
    memory, kernels = SmallMemory(0, grows_to=100), parts.sampler._kernels
    inner = getattr(kernels, op)

    def requesting(logits: torch.Tensor, rows: Any, *rest: Any) -> Any:
        memory.request(len(rows))
        return inner(logits, rows, *rest)

    monkeypatch.setattr(kernels, op, requesting)
    runner = ModelRunner(parts)
    assert (*start(runner, sampling), *go_on(runner, (0, 1, 2, 3))) == expected


def test_a_failure_of_another_kind_is_not_hidden() -> None:
    fitting = RowsThatFit([1, 2], lambda: None)

    def compute(_rows: Sequence[int]) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fitting.attempt(compute)
    assert (fitting.rows, fitting.lost) == ([0, 1], {})
