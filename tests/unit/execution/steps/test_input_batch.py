"""Rows in slots, and the tensors of a step."""

from collections.abc import Sequence

import pytest
import torch

from loraplex.core.plan import NO_BLOCK, RowAdded, RowStep, Wanted
from loraplex.core.sampling_params import SamplingParams
from loraplex.core.task import Generate
from loraplex.execution.steps.input_batch import InputBatch, StepInputs
from loraplex.execution.steps.tensors import HostTensors
from loraplex.models.batch import ForwardBatch
from support.naming import naming

BLOCK_SIZE = 4
TENSORS = HostTensors(torch.device("cpu"))


def forward_batch(inputs: StepInputs, token_ids: Sequence[Sequence[int]]) -> ForwardBatch:
    return TENSORS.batch(inputs, token_ids, None)


def added(slot: int, adapters: tuple[tuple[int, float], ...] = ()) -> RowAdded:
    return RowAdded(
        slot=slot,
        sequence_id=slot,
        task=Generate(SamplingParams()),
        sequence_index=0,
        token_ids=(1, 2),
        num_prompt_tokens=2,
        adapters=adapters,
    )


@pytest.fixture
def batch() -> InputBatch:
    batch = InputBatch(8, 32, BLOCK_SIZE)
    batch.add_row(added(5))
    batch.add_row(added(2, ((7, 0.5),)))
    return batch


def test_a_step_of_two_rows(batch: InputBatch) -> None:
    first = RowStep(slot=5, start=0, num_tokens=6, new_block_ids=((30, 10),))
    forward_batch(batch.prepare([first]), [range(6)])
    steps = [
        RowStep(slot=2, start=0, num_tokens=5, new_block_ids=((20, 40),), wanted=Wanted.ALL),
        RowStep(slot=5, start=6, num_tokens=3, new_block_ids=((15,),)),
    ]
    forward = forward_batch(batch.prepare(steps), [(9, 8, 7, 6, 5), (4, 3, 2)])
    assert forward.token_ids.tolist() == [9, 8, 7, 6, 5, 4, 3, 2]
    assert forward.positions.tolist() == [0, 1, 2, 3, 4, 6, 7, 8]
    assert forward.slot_mappings[0].tolist() == [80, 81, 82, 83, 160, 42, 43, 60]
    assert forward.rows[0].query_start_loc == [0, 5, 8]
    assert forward.rows[0].seq_lens == [5, 9]
    assert forward.rows[0].block_tables[0, :2].tolist() == [20, 40]
    assert forward.rows[0].block_tables[1].tolist() == [30, 10, 15]
    assert forward.logits_indices.tolist() == [0, 1, 2, 3, 4, 7]
    assert forward.lora is None


def test_logits_of_draft_tokens_and_of_no_token(batch: InputBatch) -> None:
    steps = [
        RowStep(5, 0, 4, new_block_ids=((1,),), wanted=Wanted.NONE),
        RowStep(2, 0, 3, draft_token_ids=(5, 6), new_block_ids=((2,),)),
    ]
    forward = forward_batch(batch.prepare(steps), [(1, 2, 3, 4), (4, 5, 6)])
    assert forward.logits_indices.tolist() == [4, 5, 6]


def test_a_slot_starts_anew_for_its_next_row(batch: InputBatch) -> None:
    forward_batch(batch.prepare([RowStep(5, 0, 8, new_block_ids=((1, 2),))]), [range(8)])
    batch.remove_row(5)
    batch.add_row(added(5))
    forward = forward_batch(batch.prepare([RowStep(5, 0, 2, new_block_ids=((3,),))]), [(1, 2)])
    assert forward.rows[0].block_tables.tolist() == [[3]]


def test_adapters_of_a_row(batch: InputBatch) -> None:
    steps = [RowStep(slot, 0, 1, new_block_ids=((slot,),)) for slot in (2, 5)]
    assert batch.prepare(steps).adapters == (((7, 0.5),), ())


def test_a_plan_that_forgot_a_block_is_refused(batch: InputBatch) -> None:
    """Or the row would write into a block of another."""
    with pytest.raises(AssertionError, match=naming("block")):
        forward_batch(batch.prepare([RowStep(5, 0, 5, new_block_ids=((1,),))]), [range(5)])


def test_a_taken_slot_is_refused(batch: InputBatch) -> None:
    with pytest.raises(AssertionError, match=naming(5)):
        batch.add_row(added(5))


def test_rows_that_decode_move_on_and_take_blocks(batch: InputBatch) -> None:
    prompts = [RowStep(5, 0, 3, new_block_ids=((7,),)), RowStep(2, 0, 7, new_block_ids=((3, 9),))]
    forward_batch(batch.prepare(prompts), [range(3), range(7)])
    forwards = []
    for moved in range(3):
        steps = [
            RowStep(5, 3 + moved, 1, new_block_ids=((8,) if moved == 1 else (),)),
            RowStep(2, 7 + moved, 1, new_block_ids=((1,) if moved == 1 else (),)),
        ]
        forwards.append(forward_batch(batch.prepare(steps), [[moved], [10 + moved]]))
    assert [f.positions.tolist() for f in forwards] == [[3, 7], [4, 8], [5, 9]]
    assert [f.slot_mappings[0].tolist() for f in forwards] == [[31, 39], [32, 4], [33, 5]]
    assert [f.rows[0].seq_lens for f in forwards] == [[4, 8], [5, 9], [6, 10]]
    assert [f.token_ids.tolist() for f in forwards] == [[0, 10], [1, 11], [2, 12]]
    assert forwards[0].rows[0].block_tables[:, :2].tolist() == [[7, 0], [3, 9]]
    assert forwards[2].rows[0].block_tables.tolist() == [[7, 8, 0], [3, 9, 1]]
    assert all(f.logits_indices.tolist() == [0, 1] for f in forwards)


def test_a_row_that_takes_the_slot_of_one_that_decoded_has_its_own_blocks(
    batch: InputBatch,
) -> None:
    forward_batch(batch.prepare([RowStep(5, 0, 1, new_block_ids=((7,),))]), [[1]])
    batch.remove_row(5)
    batch.add_row(added(5))
    forward = forward_batch(batch.prepare([RowStep(5, 0, 1, new_block_ids=((3,),))]), [[1]])
    assert forward.slot_mappings[0].tolist() == [12]


def test_each_cache_group_has_its_own_blocks() -> None:
    batch = InputBatch(8, 32, BLOCK_SIZE, num_cache_groups=2)
    batch.add_row(added(5))
    batch.add_row(added(2))
    steps = [
        RowStep(5, 0, 6, new_block_ids=((30, 10), (1, 2))),
        RowStep(2, 8, 3, new_block_ids=((20, 40, 50), (NO_BLOCK, 4, 3))),
    ]
    inputs = batch.prepare(steps)
    forward = forward_batch(inputs, [range(6), range(3)])
    assert [rows.block_tables.tolist() for rows in forward.rows] == [
        [[30, 10, 0], [20, 40, 50]],
        [[1, 2, 0], [0, 4, 3]],
    ]
    assert [mapping.tolist() for mapping in forward.slot_mappings] == [
        [120, 121, 122, 123, 40, 41, 200, 201, 202],
        [4, 5, 6, 7, 8, 9, 12, 13, 14],
    ]
    assert all(tensor.is_contiguous() for tensor in forward.slot_mappings)
    alone = inputs.of_rows([1])
    assert [mapping.tolist() for mapping in alone.slot_mappings] == [[200, 201, 202], [12, 13, 14]]
    assert [tables.tolist() for tables in alone.block_tables] == [[[20, 40, 50]], [[0, 4, 3]]]


def test_a_plan_with_blocks_for_one_cache_group_is_refused() -> None:
    batch = InputBatch(8, 32, BLOCK_SIZE, num_cache_groups=2)
    batch.add_row(added(5))
    with pytest.raises(AssertionError, match=naming("block")):
        batch.prepare([RowStep(5, 0, 1, new_block_ids=((1,), ()))])


def test_the_table_of_each_cache_group_has_its_own_length() -> None:
    """The second group takes all blocks at once, the first one what a step needs."""
    batch = InputBatch(8, 32, BLOCK_SIZE, num_cache_groups=2)
    batch.add_row(added(5))
    first = batch.prepare([RowStep(5, 0, 4, new_block_ids=((7,), (1, 2, 3)))])
    assert [tables.tolist() for tables in first.block_tables] == [[[7]], [[1, 2, 3]]]
    assert first.new_blocks == ((5, ((0, [7]), (0, [1, 2, 3]))),)
    second = batch.prepare([RowStep(5, 4, 3, new_block_ids=((9,), ()))])
    assert [tables.tolist() for tables in second.block_tables] == [[[7, 9]], [[1, 2, 3]]]
    assert second.new_blocks == ((5, ((1, [9]), (3, []))),)
    assert [mapping.tolist() for mapping in second.slot_mappings] == [[36, 37, 38], [8, 9, 10]]
