"""Where rows of a step read and write states, in arrays and on an accelerator, and their plans."""

import dataclasses

import msgspec
import numpy as np
import pytest
import torch

from loraplex.core.cache import States
from loraplex.core.plan import CacheGroupCapacity, RowAdded, RowStep
from loraplex.core.sampling_params import SamplingParams
from loraplex.core.task import Generate
from loraplex.execution.sampling.pending_samples import TokenFeed
from loraplex.execution.steps.input_batch import (
    InputBatch,
    StepInputs,
    groups_of_states,
    no_rows,
)
from loraplex.execution.steps.tensors import DeviceTensors, HostTensors
from loraplex.kernels.native.backend import NativeKernels
from loraplex.kernels.native.library import NativeLibraryError, load_library
from loraplex.kernels.states import StatePlan
from loraplex.models.batch import ForwardBatch
from loraplex.models.mixers.state_plan import StateKind
from support.delayed_accelerator import DelayedAccelerator
from support.fake_runner import FAKE_CAPACITY

CAPACITY = msgspec.structs.replace(
    FAKE_CAPACITY,
    block_size=2,
    cache_groups=(
        CacheGroupCapacity(num_blocks=40),
        CacheGroupCapacity(num_blocks=40, spec=States(4)),
    ),
    max_model_len=32,
)
BLOCKS = tuple(range(20, 26))
PROMPTS = [
    RowStep(3, 0, 10, token_ids=(1,) * 10, new_block_ids=(BLOCKS[:5], (-1, 7))),
    RowStep(1, 0, 3, token_ids=(1,) * 3, new_block_ids=((30, 31), ())),
]
DECODES = [
    RowStep(3, 10, 3, draft_token_ids=(1, 1), new_block_ids=((BLOCKS[5], 26), (9,))),
    RowStep(1, 3, 1, new_block_ids=((), (8,))),
]


def batch_of_rows() -> InputBatch:
    states = groups_of_states(CAPACITY)
    batch = InputBatch(8, 32, 2, len(CAPACITY.cache_groups), states=states)
    for slot in (3, 1):
        batch.add_row(RowAdded(slot, slot, Generate(SamplingParams()), 0, (1,), 1))
    return batch


def reads(inputs: StepInputs) -> list[int]:
    assert inputs.state_rows is not None
    return list(inputs.state_rows.reads[1])


def test_a_row_writes_after_the_last_token_of_a_chunk_and_never_into_a_gap() -> None:
    batch = batch_of_rows()
    inputs = batch.prepare(PROMPTS)
    assert reads(inputs) == [-1, -1], "no state is zero"
    assert inputs.slot_mappings[1].tolist() == [-1] * 7 + [7] + [-1] * 5
    inputs = batch.prepare(DECODES)
    assert reads(inputs) == [7, -1]
    assert inputs.slot_mappings[1].tolist() == [-1, 9, -1, 8]


def test_rows_alone_keep_their_states() -> None:
    batch = batch_of_rows()
    batch.prepare(PROMPTS)
    alone = batch.prepare(DECODES).of_rows([0])
    assert reads(alone) == [7]
    assert alone.state_rows is not None
    assert alone.state_rows.query_start_loc.tolist() == [0, 3]
    assert alone.slot_mappings[1].tolist() == [-1, 9, -1]


def test_draft_tokens_as_rows_stay_one_row_for_states() -> None:
    batch = batch_of_rows()
    batch.prepare(PROMPTS)
    inputs = batch.prepare(DECODES).with_row_per_token()
    assert len(inputs.seq_lens) == 4
    assert inputs.state_rows is not None
    assert inputs.state_rows.query_start_loc.tolist() == [0, 3, 4]


def test_padded_rows_read_and_write_nothing_on_an_accelerator() -> None:
    accelerator = DelayedAccelerator(seed=1)
    tensors = DeviceTensors(accelerator, TokenFeed(accelerator, 8), CAPACITY, 8)
    batch = batch_of_rows()
    batch.prepare(PROMPTS)
    inputs = batch.prepare(DECODES).with_row_per_token()
    inputs = dataclasses.replace(inputs, num_padding=2)
    with accelerator.compute():
        forward = tensors.batch(inputs, [(1, 1, 1), (1,)], None)
    accelerator.synchronize()
    rows = forward.state_rows
    assert rows is not None
    assert rows.query_start_loc.tolist() == [0, 3, 4, 4, 4, 4, 4], "too many rows have no tokens"
    assert rows.reads[1].tolist() == [7, -1, -1, -1, -1, -1]
    assert forward.slot_mappings[1].tolist() == [-1, 9, -1, 8, -1, -1]
    blank = dataclasses.replace(no_rows(2, groups_of_states(CAPACITY)), num_padding=3)
    with accelerator.compute():
        recorded = tensors.batch(blank, (), None)
    accelerator.synchronize()
    assert recorded.state_rows is not None
    assert recorded.state_rows.reads[1].tolist() == [-1] * 3
    assert recorded.state_rows.reads[1].data_ptr() == rows.reads[1].data_ptr()


def test_a_host_has_the_same_numbers() -> None:
    batch = batch_of_rows()
    inputs = batch.prepare(PROMPTS)
    forward = HostTensors(torch.device("cpu")).batch(inputs, [(1,) * 10, (1,) * 3], None)
    assert forward.state_rows is not None
    assert np.array_equal(forward.state_rows.reads[1].numpy(), [-1, -1])
    assert forward.state_rows.query_start_loc.tolist() == [0, 10, 13]


KIND = StateKind(states=1, chunk=0)


def on_host(inputs: StepInputs) -> ForwardBatch:
    tokens = [(1,) * count for count in np.diff(inputs.query_start_loc)]
    return HostTensors(torch.device("cpu")).batch(inputs, tokens, None)


def decoded(states: tuple[int, int]) -> StatePlan:
    """Return the plan of a step in which two rows of five tokens decode from these states."""
    batch = batch_of_rows()
    prompts = [
        RowStep(slot, 0, 5, token_ids=(1,) * 5, new_block_ids=((0, 1, 2), (state,)))
        for slot, state in zip((3, 1), states, strict=True)
    ]
    batch.prepare(prompts)
    return KIND.plan(on_host(batch.prepare([RowStep(slot, 5, 1) for slot in (3, 1)])))


def test_a_plan_finds_the_positions_of_each_row() -> None:
    """Draft tokens are rows of their own elsewhere."""
    accelerator = DelayedAccelerator(seed=1)
    tensors = DeviceTensors(accelerator, TokenFeed(accelerator, 8), CAPACITY, 8)
    batch = batch_of_rows()
    prompts = batch.prepare(PROMPTS)
    with accelerator.compute():
        tensors.batch(prompts, [(1,) * 10, (1,) * 3], None)
    decodes = batch.prepare(DECODES)
    inputs = dataclasses.replace(decodes.with_row_per_token(), num_padding=2)
    with accelerator.compute():
        plans = [
            KIND.plan(on_host(decodes)),
            KIND.plan(tensors.batch(inputs, [(1, 1, 1), (1,)], None)),
        ]
    accelerator.synchronize()
    for plan in plans:
        assert plan.query_start_loc[:3].tolist() == [0, 3, 4]
        assert plan.query_start_loc[3:].unique().tolist() == [4], "the other rows have no tokens"
        assert plan.positions[:4].tolist() == [10, 11, 12, 3]
        assert plan.reads.tolist() == [7] + [-1] * (len(plan.reads) - 1)
        assert plan.writes.tolist()[:4] == [-1, 9, -1, 8]
        assert plan.places.tolist()[:4] == [50, 51, 52, 63]
        for row, blocks in enumerate(([*BLOCKS, 26], [30, 31])):
            entries = plan.table_starts[row] + torch.arange(len(blocks))
            assert plan.tables[entries].tolist() == blocks
    assert plans[1].writes.tolist()[4:] == plans[1].places.tolist()[4:] == [-1, -1]


def test_plans_of_steps_that_may_be_repeated_have_one_size() -> None:
    """A record knows the number of tokens, not how many of them are draft tokens."""
    batch = batch_of_rows()
    batch.prepare(PROMPTS)
    plan = KIND.plan(on_host(batch.prepare(DECODES)))
    assert [len(tensor) for tensor in plan[:-1]] == [5, 4, 4, 4, 4, 4]


def test_a_native_program_reads_the_plan_of_its_step() -> None:
    try:
        kernels = NativeKernels(load_library(), 1)
    except NativeLibraryError as error:
        pytest.skip(f"the native kernels are not built: {error}")
    states = torch.arange(20.0).unsqueeze(1)

    def read(plan: StatePlan) -> list[float]:
        rows = kernels.repeat("read", (plan,), lambda: kernels.take_rows(states, plan.reads))
        return rows.flatten().tolist()

    assert read(decoded((5, 6))) == [5.0, 6.0]
    (program,) = kernels._programs.values()
    assert program is not None
    assert read(decoded((3, 9))) == [3.0, 9.0]
