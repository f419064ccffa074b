"""Vectors of hidden states, and of which rows they are."""

import math

import numpy as np
import pytest
import torch

from loraplex.core.plan import RowResult, RowStep, Wanted
from loraplex.core.task import Pool, PoolActivation, PoolKind
from loraplex.execution.pooling import MixedSample, Pooler, token_scores, vector
from loraplex.execution.sampling.pending_samples import EndedSample
from loraplex.kernels.accelerator import HostAccelerator

X = torch.tensor([3.0, 4.0, 12.0])


class States:
    """Hidden states [T, hidden] of a step, with a head of one label for each two tokens."""

    def __init__(self, states):
        self.states = states

    def rows(self, tokens):
        return self.states[tokens.start : tokens.stop]

    def scores(self, tokens):
        return [self.states[token].float()[: token // 2] for token in tokens]

    def logits(self, tokens):
        return 10 * self.states[tokens]


def test_a_vector_is_cut_before_it_is_normalized():
    assert vector(X, Pool(dimensions=2)).tolist() == pytest.approx([0.6, 0.8])
    assert vector(X, Pool(dimensions=2, normalize=False)).tolist() == [3.0, 4.0]
    assert vector(torch.zeros(3), Pool()).tolist() == [0.0] * 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_results_in_the_order_of_the_rows(dtype):
    pooler = Pooler(HostAccelerator())
    for slot in (1, 2, 4):
        pooler.add_row(slot, Pool(normalize=False))
    assert 1 in pooler
    assert 0 not in pooler
    steps = [
        RowStep(4, 0, 2, (1, 2), wanted=Wanted.POOL),
        RowStep(0, 5, 1),
        RowStep(2, 0, 2, (1, 2), wanted=Wanted.NONE),
        RowStep(1, 0, 2, (1, 2), wanted=Wanted.POOL),
    ]
    states = torch.stack([-X, X, 2 * X, -X, 2 * X]).to(dtype)
    vectors = pooler.launch(States(states), [(steps[0], 0, 2), (steps[3], 3, 5)])
    sample = MixedSample(steps, EndedSample([RowResult(0, (7,))]), vectors)
    sample.wait()
    first, sampled, chunk, last = sample.finish()
    assert (first.slot, np.frombuffer(first.pooled, "<f4").tolist()) == (4, [3.0, 4.0, 12.0])
    assert sampled == RowResult(0, (7,))
    assert chunk == RowResult(2)
    assert (last.slot, np.frombuffer(last.pooled, "<f4").tolist()) == (1, [6.0, 8.0, 24.0])


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_state_that_is_not_finite_fails_its_row_alone(value):
    pooler = Pooler(HostAccelerator())
    for slot in (0, 1):
        pooler.add_row(slot, Pool())
    steps = [RowStep(slot, 0, 1, (1,), wanted=Wanted.POOL) for slot in (0, 1)]
    broken = torch.tensor([1.0, value, 1.0])
    rows = [(step, index, index + 1) for index, step in enumerate(steps)]
    bad, good = pooler.launch(States(torch.stack([broken, X])), rows).finish()
    assert bad.error is not None
    assert bad.error.code == "row_failed"
    assert not bad.pooled
    assert good.error is None
    assert good.pooled


def test_scores_of_any_number_of_labels_and_tokens_in_one_step():
    pooler = Pooler(HostAccelerator())
    pools = [
        Pool(PoolKind.SCORE, normalize=False),
        Pool(normalize=False),
        Pool(PoolKind.LOGITS, normalize=False, token_ids=(2, 0, 2)),
        Pool(PoolKind.SCORE, activation=PoolActivation.SOFTMAX, normalize=False),
        Pool(PoolKind.LOGITS, activation=PoolActivation.SOFTMAX, normalize=False, token_ids=(1,)),
        Pool(PoolKind.SCORE, normalize=False),
    ]
    for slot, pool in enumerate(pools):
        pooler.add_row(slot, pool)
    steps = [RowStep(slot, 0, 1, (1,), wanted=Wanted.POOL) for slot in range(len(pools))]
    ends = [5, 1, 2, 7, 4, 6]
    rows = [(step, end - 1, end) for step, end in zip(steps, ends, strict=True)]
    factors = torch.arange(8.0).unsqueeze(1)
    results = pooler.launch(States(factors * X / 10), rows[:5]).finish()
    values = [np.frombuffer(result.pooled, "<f4").tolist() for result in results]
    assert values == [
        pytest.approx(expected)
        for expected in (
            [1.2, 1.6],
            [0.0, 0.0, 0.0],
            [12.0, 3.0, 12.0],
            torch.softmax(6 * X / 10, 0).tolist(),
            [1 / (1 + math.exp(-12.0))],
        )
    ]


def test_a_row_without_a_head_fails_alone():
    pooler = Pooler(HostAccelerator())
    for slot in (0, 1):
        pooler.add_row(slot, Pool(PoolKind.SCORE, normalize=False))
    steps = [RowStep(slot, 0, 1, (1,), wanted=Wanted.POOL) for slot in (0, 1)]
    bare, scored = pooler.launch(
        States(torch.stack([X] * 4)), [(steps[0], 0, 1), (steps[1], 3, 4)]
    ).finish()
    assert bare.error is not None
    assert "classification head" in bare.error.message
    assert np.frombuffer(scored.pooled, "<f4").tolist() == [3.0]


def test_log_probabilities_of_tokens_are_among_all_tokens():
    pool = Pool(PoolKind.LOGITS, normalize=False, token_ids=(2, 0), is_logprobs=True)
    expected = torch.log_softmax(X, 0)[[2, 0]]
    torch.testing.assert_close(token_scores(X, pool), expected)
    raw = Pool(PoolKind.LOGITS, normalize=False, token_ids=(2, 0))
    assert token_scores(X, raw).tolist() == [12.0, 3.0]
