"""Requests for vectors: their rows, their ends, and which are refused."""

import msgspec
import pytest

from loraplex.core.output import FinishReason
from loraplex.core.plan import RowResult, Wanted
from loraplex.core.scheduler_settings import SchedulerSettings
from loraplex.core.task import Pool, PoolKind
from support.capacities import changed_capacity
from support.fake_engine import FakeEngine
from support.fake_runner import FAKE_CAPACITY


def fake_engine(settings=None, *, overlap=False, **capacity):
    capacity = {"block_size": 4, "num_blocks": 32, "max_num_seqs": 4, **capacity}
    fakes = changed_capacity(FAKE_CAPACITY, **capacity)
    return FakeEngine(fakes, SchedulerSettings(**(settings or {})), overlap=overlap)


def result_of(fakes, request_id):
    """Return the vector, the reason of the end, and the error's code."""
    outputs = fakes.completions[request_id].outputs
    deltas = [delta for output in outputs for delta in output.deltas]
    error = outputs[-1].error
    reasons = [delta.finish_reason for delta in deltas if delta.finish_reason is not None]
    assert not any(delta.token_ids for delta in deltas)
    return b"".join(d.pooled for d in deltas), reasons, None if error is None else error.code


@pytest.mark.parametrize("overlap", [False, True])
def test_a_vector_comes_with_the_last_chunk_of_its_prompt(overlap):
    fakes = fake_engine({"max_num_batched_tokens": 6}, overlap=overlap)
    generated = fakes.add([1, 2], max_tokens=8)
    pooled = fakes.add(range(10, 22), task=Pool())
    fakes.run()
    expected = fakes.runner.model.pooled(fakes.requests[pooled])
    assert result_of(fakes, pooled) == (expected, [FinishReason.STOP], None)
    assert fakes.tokens(generated) == fakes.alone(generated)
    slot = next(a.slot for plan in fakes.runner.plans for a in plan.added if a.task == Pool())
    rows = [row for plan in fakes.runner.plans for row in plan.rows if row.slot == slot]
    of_pool = [row for row in rows if row.wanted is not Wanted.LAST]
    assert [row.wanted for row in of_pool][-1] is Wanted.POOL
    assert {row.wanted for row in of_pool[:-1]} == {Wanted.NONE}
    assert sum(row.num_tokens for row in of_pool) == 12


def test_a_vector_of_one_token():
    fakes = fake_engine({"num_draft_tokens": 3})
    request_id = fakes.add([5], task=Pool())
    fakes.run()
    expected = fakes.runner.model.pooled(fakes.requests[request_id])
    assert result_of(fakes, request_id) == (expected, [FinishReason.STOP], None)
    timing = fakes.completions[request_id].outputs[-1].timing
    assert timing.first_token_ns == timing.last_token_ns > 0
    assert timing.num_output_tokens == 0


def test_a_prompt_finds_its_beginning_in_the_prefix_cache():
    fakes = fake_engine()
    first = fakes.add(range(12), task=Pool())
    fakes.run()
    second = fakes.add(range(12), task=Pool())
    fakes.run()
    assert result_of(fakes, first) == result_of(fakes, second)
    assert fakes.completions[second].outputs[-1].timing.num_cached_tokens == 8


def test_a_model_in_both_directions_computes_a_prompt_whole_and_finds_none_of_it():
    fakes = fake_engine({"max_num_batched_tokens": 14, "max_prefill_chunk": 4}, is_causal=False)
    ids = [fakes.add(range(12), task=Pool()) for _ in range(2)]
    fakes.run()
    ids.append(fakes.add(range(12), task=Pool()))
    fakes.run()
    rows = [row for plan in fakes.runner.plans for row in plan.rows]
    assert [(row.start, row.num_tokens) for row in rows] == [(0, 12)] * 3
    for request_id in ids:
        assert result_of(fakes, request_id)[2] is None
        assert fakes.completions[request_id].outputs[-1].timing.num_cached_tokens == 0
    too_long = fakes.add(range(15), task=Pool())
    fakes.run()
    error = fakes.completions[too_long].outputs[-1].error
    assert error.code == "prompt_too_long"
    assert "max_num_batched_tokens" in error.message
    assert "15" in error.message


@pytest.mark.parametrize(("is_causal", "reason"), [(True, "output layer"), (False, "later ones")])
def test_a_model_that_generates_nothing_says_why(is_causal, reason):
    fakes = fake_engine(generates=False, is_causal=is_causal)
    request_id = fakes.add([1, 2], max_tokens=3)
    fakes.run()
    error = fakes.completions[request_id].outputs[-1].error
    assert (error.code, error.param) == ("unsupported_feature", "model")
    assert reason in error.message


@pytest.mark.parametrize(
    ("length", "task", "code"),
    [
        (20, Pool(), None),
        (21, Pool(), "prompt_too_long"),
        (4, Pool(PoolKind.MEAN), "unsupported_feature"),
        (4, Pool(PoolKind.CLS), "unsupported_feature"),
        (4, Pool(dimensions=16), None),
        (4, Pool(dimensions=17), "invalid_parameter"),
    ],
)
def test_requests_that_are_refused(length, task, code):
    fakes = fake_engine(max_model_len=20)
    request_id = fakes.add(range(length), task=task)
    fakes.run()
    assert result_of(fakes, request_id)[2] == code


def test_a_refusal_names_the_kind_and_the_kinds_that_are_served():
    fakes = fake_engine()
    request_id = fakes.add([1], task=Pool(PoolKind.MEAN))
    fakes.run()
    error = fakes.completions[request_id].outputs[-1].error
    assert error.param == "kind"
    assert "mean" in error.message
    assert "last" in error.message


def test_a_token_outside_the_vocabulary_is_refused():
    fakes = fake_engine(pool_kinds=tuple(PoolKind))
    vocab_size = fakes.runner.capacity().vocab_size
    for token_id in (vocab_size, -1):
        pool = Pool(PoolKind.LOGITS, normalize=False, token_ids=(0, token_id))
        request_id = fakes.add([1], task=pool)
        fakes.run()
        error = fakes.completions[request_id].outputs[-1].error
        assert (error.code, error.param) == ("token_out_of_vocabulary", "token_ids")
        assert str(token_id) in error.message


def test_a_runner_without_vectors():
    fakes = fake_engine(pool_kinds=())
    request_id = fakes.add([1], task=Pool())
    fakes.run()
    assert result_of(fakes, request_id)[2] == "unsupported_feature"


def test_blocks_for_every_position_of_a_prompt():
    """The last position needs a block, too: a prompt with one new token needs none for it."""
    fakes = fake_engine(num_blocks=2)
    ids = [fakes.add(range(length), task=Pool()) for length in (8, 9)]
    fakes.run()
    assert [result_of(fakes, request_id)[2] for request_id in ids] == [None, "prompt_too_long"]


@pytest.mark.parametrize("change", [{"pooled": b""}, {"token_ids": (3,)}])
def test_a_result_that_is_no_vector_fails_its_row(monkeypatch, change):
    fakes = fake_engine()
    result_of_row = fakes.runner._result

    def changed(row, step) -> RowResult:
        return msgspec.structs.replace(result_of_row(row, step), **change)

    monkeypatch.setattr(fakes.runner, "_result", changed)
    request_id = fakes.add([1, 2], task=Pool())
    fakes.run()
    assert result_of(fakes, request_id)[2] == "row_failed"
