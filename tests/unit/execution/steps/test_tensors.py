"""What an accelerator is sent: the numbers of the host, at addresses that stay."""

import dataclasses
from collections.abc import Iterator, Sequence

import msgspec
import numpy as np
import pytest
import torch

from loraplex.core.plan import (
    CacheGroupCapacity,
    Capacity,
    PageGeometry,
    RowAdded,
    RowStep,
    Wanted,
)
from loraplex.core.sampling_params import SamplingParams
from loraplex.core.task import Generate
from loraplex.execution.mirror import Mirror
from loraplex.execution.sampling.pending_samples import TokenFeed
from loraplex.execution.steps.input_batch import InputBatch, StepInputs, no_rows
from loraplex.execution.steps.tensors import ON_DEVICE, DeviceTensors, HostTensors
from loraplex.kernels.ops import DeviceRows
from loraplex.models.batch import ForwardBatch
from support.delayed_accelerator import DelayedAccelerator

BLOCK_SIZE = 4
CAPACITY = Capacity(
    block_size=BLOCK_SIZE,
    cache_groups=(CacheGroupCapacity(num_blocks=100),),
    max_num_seqs=6,
    max_num_batched_tokens=64,
    max_model_len=40,
    vocab_size=1000,
    page_geometry=PageGeometry(1, 1),
    num_adapter_pages=0,
    adapter_page_bytes=0,
    keeps_host_copy=True,
)
NUM_RECORDED = 8


class Bench:
    def __init__(self, num_cache_groups: int = 1) -> None:
        self.accelerator = DelayedAccelerator(seed=1)
        self.rows = InputBatch(6, 40, BLOCK_SIZE, num_cache_groups)
        self.feed = TokenFeed(self.accelerator, 6)
        capacity = msgspec.structs.replace(
            CAPACITY, cache_groups=CAPACITY.cache_groups * num_cache_groups
        )
        self.tensors = DeviceTensors(self.accelerator, self.feed, capacity, NUM_RECORDED)
        for slot in (4, 1, 0):
            self.rows.add_row(
                RowAdded(
                    slot,
                    slot,
                    Generate(SamplingParams()),
                    0,
                    (1,),
                    1,
                )
            )

    def batch(
        self, steps: Sequence[RowStep], token_ids: Sequence[Sequence[int]], num_padding: int = 0
    ) -> ForwardBatch:
        inputs = dataclasses.replace(self.rows.prepare(steps), num_padding=num_padding)
        return self.tensors.batch(inputs, token_ids, None)


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    with bench.accelerator.compute():
        yield bench
        bench.accelerator.synchronize()


def on_device(batch: ForwardBatch, cache_group: int = 0) -> DeviceRows:
    rows = batch.rows[cache_group].on_device
    assert rows is not None
    return rows


def table(batch: ForwardBatch, row: int, num_blocks: int, cache_group: int = 0) -> list[int]:
    rows = on_device(batch, cache_group)
    return rows.block_tables[rows.table_rows[row], :num_blocks].tolist()


PROMPTS = [
    RowStep(4, 0, 6, new_block_ids=((30, 10),), wanted=Wanted.NONE),
    RowStep(1, 0, 5, new_block_ids=((20, 40),), wanted=Wanted.ALL),
]
DECODES = [RowStep(4, 6, 1), RowStep(1, 5, 1), RowStep(0, 0, 1, new_block_ids=((7,),))]


def test_it_is_what_a_cpu_gets(bench: Bench) -> None:
    tokens = [range(6), range(10, 15)]
    batch = bench.batch(PROMPTS, tokens)
    host = InputBatch(6, 40, BLOCK_SIZE)
    for slot in (4, 1):
        host.add_row(
            RowAdded(
                slot,
                slot,
                Generate(SamplingParams()),
                0,
                (1,),
                1,
            )
        )
    expected = HostTensors(torch.device("cpu")).batch(host.prepare(PROMPTS), tokens, None)
    for name in ("token_ids", "positions", "logits_indices"):
        assert getattr(batch, name).equal(getattr(expected, name)), name
    assert all(map(torch.equal, batch.slot_mappings, expected.slot_mappings))
    rows = on_device(batch)
    assert rows.query_start_loc.tolist() == batch.rows[0].query_start_loc == [0, 6, 11]
    assert rows.seq_lens.tolist() == batch.rows[0].seq_lens == [6, 5]
    assert [table(batch, row, 2) for row in (0, 1)] == expected.rows[0].block_tables.tolist()
    assert rows.query_start_loc.dtype == rows.seq_lens.dtype == rows.block_tables.dtype
    assert rows.block_tables.dtype == torch.int32


def test_padding_is_tokens_of_no_row(bench: Bench) -> None:
    bench.batch(PROMPTS, [range(6), range(5)])
    batch = bench.batch(DECODES, [[5], [6], [7]], num_padding=2)
    assert batch.token_ids.tolist() == [5, 6, 7, 0, 0]
    assert batch.positions.tolist() == [6, 5, 0, 0, 0]
    assert batch.slot_mappings[0].tolist() == [42, 161, 28, -1, -1]
    assert batch.logits_indices.tolist() == [0, 1, 2, 3, 4]
    rows = on_device(batch)
    assert rows.query_start_loc.tolist() == [0, 1, 2, 3, 3, 3]
    assert rows.seq_lens.tolist() == [7, 6, 1, 0, 0]
    assert batch.rows[0].seq_lens == [7, 6, 1]
    assert [table(batch, row, 2) for row in range(5)] == [
        [30, 10],
        [20, 40],
        [7, 0],
        [0, 0],
        [0, 0],
    ]


def test_a_step_of_padding_alone(bench: Bench) -> None:
    batch = bench.tensors.batch(dataclasses.replace(no_rows(1), num_padding=4), (), None)
    assert batch.token_ids.tolist() == [0] * 4
    assert batch.slot_mappings[0].tolist() == [-1] * 4
    assert on_device(batch).query_start_loc.tolist() == [0] * 5


def test_small_steps_lie_at_the_same_addresses(bench: Bench) -> None:
    def addresses(batch: ForwardBatch) -> list[int]:
        rows = on_device(batch)
        tensors = (batch.token_ids, batch.positions, *batch.slot_mappings, rows.query_start_loc)
        return [t.data_ptr() for t in (*tensors, rows.seq_lens, rows.table_rows)]

    first = addresses(bench.batch([RowStep(0, 0, 1, new_block_ids=((7,),))], [[1]], num_padding=3))
    bench.batch(PROMPTS, [range(6), range(5)])
    second = addresses(bench.batch(DECODES[:2], [[5], [6]], num_padding=2))
    assert first == second
    assert all(address % 16 == 0 for address in first)


def test_many_new_blocks_do_not_move_what_follows(bench: Bench) -> None:
    """They need more memory than a recorded step has."""
    blocks = tuple(range(50, 60))
    batch = bench.batch([RowStep(0, 36, 1, new_block_ids=(blocks,))], [[9]], num_padding=1)
    assert batch.token_ids.tolist() == [9, 0]
    assert table(batch, 0, 10) == list(blocks)
    assert batch.slot_mappings[0].tolist() == [59 * BLOCK_SIZE, -1]


def test_tokens_that_only_the_device_knows(bench: Bench) -> None:
    bench.batch(PROMPTS, [range(6), range(5)])
    sent = bench.feed.put([4, 1], torch.tensor([77, -1]))
    steps = [RowStep(4, 6, 2, draft_token_ids=(8,)), RowStep(1, 5, 1), DECODES[2]]
    batch = bench.batch(steps, [[ON_DEVICE, 8], [ON_DEVICE], [3]])
    # A row whose logits were not finite fails; until the host knows, it computes something.
    assert batch.token_ids.tolist() == [77, 8, 0, 3]
    assert sent.take() == [77, -1]


def test_the_feed_returns_tokens_that_are_on_their_way(bench: Bench) -> None:
    first = bench.feed.put([0, 1], torch.tensor([5, 6]))
    second = bench.feed.put([1], torch.tensor([7]))
    third = bench.feed.put([], torch.tensor([], dtype=torch.int64))
    assert bench.feed.newest.tolist() == [5, 7, 0, 0, 0, 0, 0]
    assert (first.take(), second.take(), third.take()) == ([5, 6], [7], [])
    fourth = bench.feed.put([1, 0], torch.tensor([8, 9]))
    assert fourth.take() == [8, 9]


def test_a_mirror_waits_before_it_writes_over_what_is_being_copied(bench: Bench) -> None:
    """The accelerator of this test asserts it."""
    mirror = Mirror(bench.accelerator, 16)
    for number in range(8):
        (sent,) = mirror.send([np.array([number, number + 1])])
        assert sent.tolist() == [number, number + 1]
    bench.accelerator.synchronize()


def test_a_mirror_grows(bench: Bench) -> None:
    mirror = Mirror(bench.accelerator, 16)
    wide, narrow = mirror.send([np.arange(100), np.arange(3, dtype=np.int32)])
    assert (wide.tolist(), narrow.tolist()) == (list(range(100)), [0, 1, 2])


@pytest.mark.parametrize("kept", [[0, 1, 2], [0], [2], [0, 2], [1, 2]])
def test_some_rows_of_a_step(kept: list[int]) -> None:
    """Are as if the others had not been in it."""

    def batch(which: Sequence[int]) -> StepInputs:
        rows = InputBatch(6, 40, BLOCK_SIZE)
        for slot in (4, 1, 0):
            rows.add_row(
                RowAdded(
                    slot,
                    slot,
                    Generate(SamplingParams()),
                    0,
                    (1,),
                    1,
                    adapters=((slot, 1.0),),
                )
            )
        steps = (*PROMPTS, RowStep(0, 0, 3, draft_token_ids=(1, 2), new_block_ids=((5,),)))
        return rows.prepare([steps[row] for row in which])

    some, alone = batch([0, 1, 2]).of_rows(kept), batch(kept)
    for name in ("slots", "row_of_token", "positions", "logits_indices"):
        assert getattr(some, name).tolist() == getattr(alone, name).tolist(), name
    for name in ("query_start_loc", "seq_lens", "adapters", "num_tokens", "wants_all_logits"):
        assert getattr(some, name) == getattr(alone, name), name
    assert all(map(np.array_equal, some.slot_mappings, alone.slot_mappings))
    (some_tables,), (alone_tables,) = some.block_tables, alone.block_tables
    assert some_tables[:, : alone_tables.shape[1]].tolist() == alone_tables.tolist()


def test_each_cache_group_has_tables_at_addresses_that_stay() -> None:
    bench = Bench(num_cache_groups=3)

    def addresses(batch: ForwardBatch) -> list[int]:
        tables = [on_device(batch, group).block_tables for group in range(3)]
        return [tensor.data_ptr() for tensor in (*batch.slot_mappings, *tables)]

    with bench.accelerator.compute():
        prompts = [
            RowStep(4, 0, 6, new_block_ids=((30, 10), (1, 2), (5, 6))),
            RowStep(1, 0, 5, new_block_ids=((20, 40), (3, 4), (7, 8))),
        ]
        bench.batch(prompts, [range(6), range(5)])
        decodes = [RowStep(4, 6, 1), RowStep(0, 0, 1, new_block_ids=((7,), (9,), (11,)))]
        first = bench.batch(decodes, [[5], [7]], num_padding=2)
        found = addresses(first)
        assert len(set(found)) == 6
        assert all(address % 16 == 0 for address in found)
        assert [mapping.tolist() for mapping in first.slot_mappings] == [
            [42, 28, -1, -1],
            [10, 36, -1, -1],
            [26, 44, -1, -1],
        ]
        of_groups = [
            [[30, 10], [7, 0], [0, 0]],
            [[1, 2], [9, 0], [0, 0]],
            [[5, 6], [11, 0], [0, 0]],
        ]
        for group, expected in enumerate(of_groups):
            assert [table(first, row, 2, group) for row in range(3)] == expected
        later = [
            RowStep(4, 8, 1, new_block_ids=((50,), (51,), (52,))),
            RowStep(1, 8, 1, new_block_ids=((53,), (54,), (55,))),
            RowStep(0, 4, 1, new_block_ids=((56,), (57,), (58,))),
        ]
        assert addresses(bench.batch(later, [[5], [6], [7]], num_padding=1)) == found
        bench.accelerator.synchronize()


def test_tables_of_different_lengths_are_continued_where_they_end() -> None:
    bench = Bench(num_cache_groups=2)
    with bench.accelerator.compute():
        bench.batch([RowStep(4, 0, 4, new_block_ids=((30,), (1, 2, 3)))], [range(4)])
        batch = bench.batch([RowStep(4, 4, 1, new_block_ids=((10,), (5,)))], [[4]])
        assert [table(batch, 0, 4, group) for group in (0, 1)] == [[30, 10, 0, 0], [1, 2, 3, 5]]
        assert [mapping.tolist() for mapping in batch.slot_mappings] == [[40], [8]]
        bench.accelerator.synchronize()


def test_three_groups_are_sent_by_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    bench, copies = Bench(num_cache_groups=3), []
    with bench.accelerator.compute():
        copy = bench.accelerator.copy
        monkeypatch.setattr(
            bench.accelerator, "copy", lambda *given: (copies.append(given), copy(*given))
        )
        bench.batch([RowStep(0, 0, 1, new_block_ids=((7,), (8,), (9,)))], [[1]])
        assert len(copies) == 1
        bench.accelerator.synchronize()
