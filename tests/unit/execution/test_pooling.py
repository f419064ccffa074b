"""Vectors of hidden states, and of which rows they are."""

import math

import numpy as np
import pytest
import torch

from loraplex.core.plan import RowResult, RowStep, Wanted
from loraplex.core.task import Pool
from loraplex.execution.pooling import MixedSample, Pooler, vector
from loraplex.execution.sampling.pending_samples import EndedSample
from loraplex.kernels.accelerator import HostAccelerator

X = torch.tensor([3.0, 4.0, 12.0])


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
    states = torch.stack([X, 2 * X]).to(dtype)
    vectors = pooler.launch(states, [steps[0], steps[3]])
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
    bad, good = pooler.launch(torch.stack([broken, X]), steps).finish()
    assert bad.error is not None
    assert bad.error.code == "row_failed"
    assert not bad.pooled
    assert good.error is None
    assert good.pooled
