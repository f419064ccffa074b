"""Tasks, and the bytes of the messages that carry them."""

import msgspec
import pytest

from loraplex.core.errors import InvalidParameterError
from loraplex.core.output import EngineOutput, FinishReason, SequenceDelta
from loraplex.core.plan import RowAdded, RowResult, RowStep, StepPlan, StepResult, Wanted
from loraplex.core.sampling_params import SamplingParams
from loraplex.core.task import Generate, Pool, PoolActivation, PoolKind, Task

GENERATE_MESSAGES = {
    StepPlan(
        7,
        removed=(2,),
        rows=(
            RowStep(0, 12, 1),
            RowStep(1, 30, 3, draft_token_ids=(4, 5), new_block_ids=((9,),)),
            RowStep(3, 0, 4, (1, 2, 3, 4), new_block_ids=((7,),), wanted=Wanted.NONE),
            RowStep(4, 0, 2, (1, 2), wanted=Wanted.ALL, num_logprobs=1),
        ),
    ): (
        b"\x83\xa7step_id\x07\xa7removed\x91\x02\xa4rows\x94\x83\xa4slot\x00\xa5start\x0c"
        b"\xaanum_tokens\x01\x85\xa4slot\x01\xa5start\x1e\xaanum_tokens\x03\xafdraft_token_ids"
        b"\x92\x04\x05\xadnew_block_ids\x91\x91\t\x86\xa4slot\x03\xa5start\x00\xaanum_tokens\x04"
        b"\xa9token_ids\x94\x01\x02\x03\x04\xadnew_block_ids\x91\x91\x07\xa6logits\xa4none\x86"
        b"\xa4slot\x04\xa5start\x00\xaanum_tokens\x02\xa9token_ids\x92\x01\x02\xa6logits\xa3all"
        b"\xacnum_logprobs\x01"
    ),
    StepResult(7, (RowResult(0, (5,)), RowResult(3))): (
        b"\x82\xa7step_id\x07\xa4rows\x92\x82\xa4slot\x00\xa9token_ids\x91\x05\x81\xa4slot\x03"
    ),
    EngineOutput(1, (SequenceDelta(0, (5,), finish_reason=FinishReason.STOP),), finished=True): (
        b"\x83\xaarequest_id\x01\xa6deltas\x91\x83\xa5index\x00\xa9token_ids\x91\x05"
        b"\xadfinish_reason\xa4stop\xa8finished\xc3"
    ),
}
"""Messages of requests that generate, and their bytes before there were other tasks."""


@pytest.mark.parametrize("message", GENERATE_MESSAGES, ids=lambda message: type(message).__name__)
def test_steps_that_generate_have_the_bytes_of_before(message):
    assert msgspec.msgpack.encode(message) == GENERATE_MESSAGES[message]


def test_a_row_that_joins_has_its_task_without_defaults():
    row = RowAdded(0, 1, Generate(SamplingParams(max_tokens=3), seed=5), 0, (1, 2), 2)
    assert msgspec.msgpack.encode(row) == (
        b"\x86\xa4slot\x00\xabsequence_id\x01\xa4task\x83\xa4type\xa8generate\xa8sampling\xde\x00"
        b"\x01\xaamax_tokens\x03\xa4seed\x05\xaesequence_index\x00\xa9token_ids\x92\x01\x02"
        b"\xb1num_prompt_tokens\x02"
    )


@pytest.mark.parametrize(
    "task",
    [
        Generate(),
        Pool(),
        Pool(PoolKind.MEAN, 3, PoolActivation.SOFTMAX, normalize=False),
        Pool(PoolKind.LOGITS, normalize=False, token_ids=(9, 3)),
    ],
)
def test_tasks_survive_the_wire(task):
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(task), type=Task) == task


@pytest.mark.parametrize(
    ("values", "param"),
    [
        ({"kind": "lastly"}, "kind"),
        ({"activation": "relu"}, "activation"),
        ({"normalize": 1}, "normalize"),
        ({"dimensions": 0}, "dimensions"),
        ({"dimensions": 2**31}, "dimensions"),
        ({"dimensions": True}, "dimensions"),
        ({"dimensions": 2.0}, "dimensions"),
    ],
)
def test_pools_that_are_refused(values, param):
    with pytest.raises(InvalidParameterError) as refused:
        Pool(**values).validate()
    assert refused.value.param == param
    assert repr(values[param]) in str(refused.value)


@pytest.mark.parametrize("kind", [PoolKind.SCORE, PoolKind.LOGITS])
@pytest.mark.parametrize(
    ("values", "param"),
    [({"normalize": True}, "normalize"), ({"normalize": False, "dimensions": 3}, "dimensions")],
)
def test_scores_have_neither_length_nor_dimensions(kind, values, param):
    token_ids = (5,) if kind is PoolKind.LOGITS else ()
    with pytest.raises(InvalidParameterError) as refused:
        Pool(kind, token_ids=token_ids, **values).validate()
    assert refused.value.param == param
    assert str(kind) in str(refused.value)
    assert repr(values[param]) in str(refused.value)


@pytest.mark.parametrize(
    ("kind", "num_tokens"), [("score", 1), ("last", 2), ("logits", 0), ("logits", 1025)]
)
def test_token_ids_belong_to_logits(kind, num_tokens):
    pool = Pool(PoolKind(kind), normalize=kind == "last", token_ids=(1,) * num_tokens)
    with pytest.raises(InvalidParameterError) as refused:
        pool.validate()
    assert refused.value.param == "token_ids"
    assert kind in str(refused.value)
    assert f"got {num_tokens}" in str(refused.value)


def test_a_pool_of_parameters_in_their_ranges():
    Pool(dimensions=1).validate()
    Pool(PoolKind.SCORE, normalize=False).validate()
    Pool(PoolKind.LOGITS, normalize=False, token_ids=tuple(range(1024))).validate()


@pytest.mark.parametrize("pool", [Pool(is_logprobs=True), Pool(is_logprobs=1)])  # type: ignore[arg-type]
def test_log_probabilities_belong_to_logits(pool):
    with pytest.raises(InvalidParameterError) as refused:
        pool.validate()
    assert refused.value.param == "is_logprobs"
    Pool(PoolKind.LOGITS, normalize=False, token_ids=(1,), is_logprobs=True).validate()
