"""What rows read and write in groups of an encoder's positions, in arrays and on an accelerator."""

import dataclasses

import msgspec
import torch

from loraplex.core.cache import Cross
from loraplex.core.plan import CacheGroupCapacity, EncodeText, RowAdded, RowStep
from loraplex.core.sampling_params import SamplingParams
from loraplex.core.task import Generate
from loraplex.execution.sampling.pending_samples import TokenFeed
from loraplex.execution.steps.input_batch import InputBatch, groups_of_encoders, no_rows
from loraplex.execution.steps.tensors import DeviceTensors, HostTensors
from loraplex.models.batch import ForwardBatch
from support.delayed_accelerator import DelayedAccelerator
from support.fake_runner import FAKE_CAPACITY

CAPACITY = msgspec.structs.replace(
    FAKE_CAPACITY,
    block_size=2,
    cache_groups=(
        CacheGroupCapacity(num_blocks=40),
        CacheGroupCapacity(num_blocks=40, spec=Cross()),
    ),
    max_num_seqs=8,
    max_model_len=8,
    longest_encoder_input=13,
)
LONG, SHORT = tuple(range(13)), (7, 8, 9)
BLOCKS = tuple(range(30, 37))
PROMPTS = [
    RowStep(3, 0, 4, token_ids=(1,) * 4, new_block_ids=((20, 21), BLOCKS)),
    RowStep(1, 0, 1, token_ids=(1,), new_block_ids=((22,), (12, 11))),
]
DECODES = [
    RowStep(3, 4, 3, draft_token_ids=(1, 1), new_block_ids=((23, 24), ())),
    RowStep(1, 1, 1),
]


def batch_of_rows() -> InputBatch:
    groups = groups_of_encoders(CAPACITY)
    batch = InputBatch(8, 8, 2, 2, encoder_groups=groups, longest_encoder_input=13)
    for slot, given in ((3, LONG), (1, SHORT)):
        task = Generate(SamplingParams())
        batch.add_row(RowAdded(slot, slot, task, 0, (1,), 1, encoder_token_ids=given))
    return batch


def lengths(batch: ForwardBatch) -> list[int]:
    rows = batch.rows[1].on_device
    assert rows is not None
    return rows.seq_lens.tolist()


def test_rows_read_their_whole_input_and_write_nothing() -> None:
    batch = batch_of_rows()
    for steps, own in ((PROMPTS, [4, 1]), (DECODES, [7, 2])):
        inputs = batch.prepare(steps)
        assert inputs.lengths_in(0) == own
        assert inputs.lengths_in(1) == [13, 3], "an input may be longer than a sequence"
        assert set(inputs.slot_mappings[1]) == {-1}
        assert inputs.block_tables[1].tolist() == [[*BLOCKS], [12, 11, 0, 0, 0, 0, 0]]


def test_rows_alone_and_tokens_as_rows_keep_their_lengths() -> None:
    batch = batch_of_rows()
    batch.prepare(PROMPTS)
    inputs = batch.prepare(DECODES)
    assert inputs.of_rows([1]).lengths_in(1) == [3]
    assert inputs.with_row_per_token().lengths_in(1) == [13, 13, 13, 3]


def test_an_input_is_written_to_the_blocks_of_its_row() -> None:
    batch = batch_of_rows()
    batch.prepare(PROMPTS)
    (given,) = batch.encoder_inputs([EncodeText(1)])
    assert given.token_ids == SHORT
    assert [mapping.tolist() for mapping in given.slot_mappings] == [[-1] * 3, [24, 25, 22]]
    on_host = HostTensors(torch.device("cpu")).encoder_batch(given, None)
    assert on_host.token_ids.tolist() == list(SHORT)
    assert on_host.positions.tolist() == [0, 1, 2]
    assert on_host.slot_mappings[1].tolist() == [24, 25, 22]
    assert on_host.rows[1].query_start_loc == [0, 3]
    accelerator = DelayedAccelerator(seed=1)
    with accelerator.compute():
        tensors = DeviceTensors(accelerator, TokenFeed(accelerator, 8), CAPACITY, 8)
        on_device = tensors.encoder_batch(given, None)
        for name in ("token_ids", "positions"):
            assert getattr(on_device, name).equal(getattr(on_host, name))
        assert all(map(torch.equal, on_device.slot_mappings, on_host.slot_mappings))


def test_recorded_steps_find_lengths_at_addresses_that_stay() -> None:
    accelerator, batch = DelayedAccelerator(seed=1), batch_of_rows()
    with accelerator.compute():
        tensors = DeviceTensors(accelerator, TokenFeed(accelerator, 8), CAPACITY, 8)
        blank = dataclasses.replace(
            no_rows(2, encoder_groups=groups_of_encoders(CAPACITY)), num_padding=6
        )
        first = tensors.batch(blank, (), None)
        assert lengths(first) == [0] * 6
        rows = first.rows[1].on_device
        assert rows is not None
        address = rows.seq_lens.data_ptr()
        tensors.batch(batch.prepare(PROMPTS), [(1,) * 4, (1,)], None)
        inputs = dataclasses.replace(batch.prepare(DECODES).with_row_per_token(), num_padding=2)
        step = tensors.batch(inputs, [(1, 1, 1), (1,)], None)
        assert lengths(step) == [13, 13, 13, 3, 0, 0]
        assert step.rows[1].seq_lens == [13, 13, 13, 3]
        assert step.slot_mappings[1].tolist() == [-1] * 6
        found = step.rows[1].on_device
        assert found is not None
        assert found.seq_lens.data_ptr() == address
        table = found.block_tables[found.table_rows[0]]
        assert table.tolist() == list(BLOCKS)
        accelerator.synchronize()
