"""What steps take: measured by trials, estimated without a device; and which are recorded."""

import pytest
import torch

from loraplex.core.plan import CacheGroupCapacity, Capacity, PageGeometry
from loraplex.execution.sizing.measuring import (
    DUMMY_ADAPTER,
    Trials,
    largest_step,
    measure_graphs,
    measure_workspace,
)
from loraplex.execution.sizing.settings import RunnerSettings
from loraplex.execution.sizing.step_memory import (
    StepMemory,
    estimated_step_memory,
    graph_sizes,
)
from loraplex.kernels.accelerator import HostAccelerator
from support.metered_accelerator import MeteredAccelerator
from support.tiny_decoder import TINY_DECODER

MIB = 1 << 20


class FakeTrials:
    """Graphs of n sequences: a pool of 100 MiB for all, and 2 MiB each, one more for 10."""

    def __init__(self, accelerator: MeteredAccelerator) -> None:
        self.recorded: list[int] = []
        self._accelerator = accelerator
        self._taken = 0

    def trials(self) -> Trials:
        return Trials(self._set_up, self._run, self._record, self._forget)

    def _set_up(self) -> None:
        self._accelerator.take(60 * MIB)
        self._accelerator.use(90 * MIB)
        self._taken += 60 * MIB

    def _run(self) -> None:
        self._accelerator.use(70 * MIB)
        self._accelerator.use(50 * MIB)

    def _record(self, size: int) -> None:
        taken = (0 if self.recorded else 100 * MIB) + (2 + size // 10) * MIB
        self.recorded.append(size)
        self._taken += taken
        self._accelerator.use(30 * MIB)  # the computation before the recording
        self._accelerator.take(taken)

    def _forget(self) -> None:
        self._accelerator.take(-self._taken)


@pytest.fixture
def accelerator() -> MeteredAccelerator:
    accelerator = MeteredAccelerator(1000 * MIB)
    accelerator.take(300 * MIB)
    accelerator.use(80 * MIB)  # of loading the weights: it is freed before
    return accelerator


def test_the_workspace_is_the_peak_of_the_largest_step(accelerator: MeteredAccelerator) -> None:
    assert measure_workspace(accelerator, FakeTrials(accelerator).trials()) == 70 * MIB


def test_graphs_are_the_largest_and_one_more_for_each_other(
    accelerator: MeteredAccelerator,
) -> None:
    fakes = FakeTrials(accelerator)
    sizes = (1, 4, 10, 20)
    assert measure_graphs(accelerator, fakes.trials(), sizes) == (104 + 3 * 3) * MIB
    assert fakes.recorded == [20, 10]
    memory = accelerator.memory()
    assert memory is not None
    assert memory.free == 700 * MIB


@pytest.mark.parametrize(("sizes", "expected"), [((), 0), ((10,), 103 * MIB)])
def test_few_graphs(accelerator: MeteredAccelerator, sizes: tuple[int, ...], expected: int) -> None:
    assert measure_graphs(accelerator, FakeTrials(accelerator).trials(), sizes) == expected


def test_without_a_measurement_nothing_is_tried() -> None:
    def never(*_: int) -> None:
        raise AssertionError("it takes time")

    trials = Trials(never, never, never, lambda: None)
    assert measure_workspace(HostAccelerator(), trials) == 0
    assert measure_graphs(HostAccelerator(), trials, (1, 2)) == 0


def capacity(**changes: int) -> Capacity:
    numbers = {"max_num_seqs": 3, "max_num_batched_tokens": 11}
    numbers |= {"max_model_len": 100, "block_size": 16}
    return Capacity(
        **(numbers | changes),
        cache_groups=(CacheGroupCapacity(num_blocks=4),),
        vocab_size=100,
        page_geometry=PageGeometry(1, 1),
        num_adapter_pages=2,
        adapter_page_bytes=1,
        keeps_host_copy=True,
    )


def test_the_largest_step_has_all_tokens_and_rows_at_the_end_of_their_length() -> None:
    plan = largest_step(capacity(), 11)
    assert [row.num_tokens for row in plan.rows] == [1, 5, 5]
    assert plan.num_tokens == 11
    for row in plan.rows:
        assert row.token_ids is not None
        assert row.start + row.num_tokens == 100
        assert len(row.new_block_ids[0]) == 7
        assert set(row.new_block_ids[0]) == {0, 1, 2, 3}
    assert all(row.adapters == ((DUMMY_ADAPTER, 1.0),) for row in plan.added)
    assert plan.adapter_copies[0].page_ids == (0, 1)


def test_the_largest_step_of_a_model_with_an_encoder_encodes_the_longest_input() -> None:
    plan = largest_step(capacity(longest_encoder_input=130), 11)
    assert [encode.slot for encode in plan.encoded_texts] == [0]
    assert {len(row.encoder_token_ids) for row in plan.added} == {130}
    assert all(len(row.new_block_ids[0]) == 9 for row in plan.rows)


def test_the_largest_step_of_few_tokens_or_a_short_model() -> None:
    assert [row.num_tokens for row in largest_step(capacity(), 2).rows] == [1, 1]
    short = largest_step(capacity(max_model_len=5), 40)
    assert [row.num_tokens for row in short.rows] == [1, 5, 5]
    alone = largest_step(capacity(max_num_seqs=1), 40)
    assert [row.num_tokens for row in alone.rows] == [40]


@pytest.mark.parametrize(
    ("settings", "sizes"),
    [
        ({"max_num_seqs": 1}, (1,)),
        ({"max_num_seqs": 5}, (1, 2, 4, 5)),
        ({"max_num_seqs": 64}, (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64)),
        ({"max_num_seqs": 100}, (1, 2, 4, *range(8, 65, 8), 80, 96, 100)),
        ({"max_num_seqs": 1000}, (1, 2, 4, *range(8, 65, 8), *range(80, 257, 16))),
        ({"max_num_seqs": 8, "cuda_graph_batch_sizes": (16, 3, 8, 3)}, (3, 8)),
        ({"cuda_graph_batch_sizes": (65,)}, ()),
        ({"cuda_graphs": False}, ()),
    ],
)
def test_recorded_sizes(settings: dict[str, int], sizes: tuple[int, ...]) -> None:
    assert graph_sizes(RunnerSettings(**settings)) == sizes


def estimate(**settings: int | bool) -> StepMemory:
    return estimated_step_memory(RunnerSettings(**settings), TINY_DECODER, torch.bfloat16)


def test_estimates_grow_with_what_they_are_of() -> None:
    usual = estimate()
    assert estimate(max_num_batched_tokens=1024).workspace > usual.workspace
    assert estimate(max_num_seqs=128).workspace > usual.workspace
    assert estimate(max_num_seqs=128).graphs > usual.graphs > 0
    assert estimate(cuda_graphs=False) == StepMemory(usual.workspace, 0)
