from collections.abc import Sequence

import numpy as np
import pytest
import torch
from transformers.generation import logits_process as hf

from loraplex.core.sampling_params import SamplingParams
from loraplex.kernels import sampling

VOCAB = 1500  # more than the first size of the nucleus, so that both ways through top-p are taken

GRID = [
    SamplingParams(),
    SamplingParams(temperature=0.3),
    SamplingParams(temperature=2.5),
    SamplingParams(top_k=2),
    SamplingParams(top_k=700, temperature=0.7),
    SamplingParams(top_k=10**6),
    SamplingParams(top_p=0.001),
    SamplingParams(top_p=0.5),
    SamplingParams(top_p=0.97, temperature=3.0),
    SamplingParams(min_p=0.05),
    SamplingParams(min_p=1.0),
    SamplingParams(top_k=40, top_p=0.8, min_p=0.02, temperature=1.4),
]


def options(params: Sequence[SamplingParams]) -> sampling.DrawOptions:
    return sampling.DrawOptions(
        temperature=np.array([p.temperature for p in params], dtype=np.float32),
        top_k=np.array([p.top_k for p in params], dtype=np.int64),
        top_p=np.array([p.top_p for p in params]),
        min_p=np.array([p.min_p for p in params]),
        uniforms=np.zeros(len(params)),
    )


def hf_probabilities(row: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    warpers = [hf.TemperatureLogitsWarper(params.temperature)]
    if params.top_k > 0:
        warpers.append(hf.TopKLogitsWarper(params.top_k))
    if params.top_p < 1.0:
        warpers.append(hf.TopPLogitsWarper(params.top_p))
    if params.min_p > 0.0:
        warpers.append(hf.MinPLogitsWarper(params.min_p))
    scores = row.unsqueeze(0)
    for warper in warpers:
        scores = warper(None, scores)
    return scores.softmax(-1)[0]


@pytest.mark.parametrize("seed", range(4))
def test_the_kept_set_and_its_probabilities_are_those_of_transformers(seed):
    logits = 3 * torch.randn(len(GRID), VOCAB, generator=torch.Generator().manual_seed(seed))
    weights = sampling.kept_weights(logits.clone(), options(GRID))
    probabilities = weights / weights.sum(-1, keepdim=True)
    for row, params, got in zip(logits, GRID, probabilities, strict=True):
        expected = hf_probabilities(row, params)
        drawable = expected >= expected.max() * 2**-40
        assert torch.equal(got > 0, drawable), params
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-9)


def test_a_row_s_weights_do_not_depend_on_its_company():
    logits = 3 * torch.randn(len(GRID), VOCAB, generator=torch.Generator().manual_seed(9))
    together = sampling.kept_weights(logits.clone(), options(GRID))
    for index, params in enumerate(GRID):
        alone = sampling.kept_weights(logits[index : index + 1].clone(), options([params]))
        assert torch.equal(alone[0], together[index])


def test_top_k_keeps_ties_with_the_kth():
    logits = torch.tensor([[1.0, 3.0, 2.0, 2.0, 0.0]])
    kept = sampling.keep_top_k(logits, torch.tensor([[2]]))
    assert torch.isfinite(kept).tolist() == [[False, True, True, True, False]]


def test_top_p_breaks_ties_by_token_id():
    weights = torch.tensor([[10, 40, 10, 10, 10, 20]])
    kept = sampling.keep_top_p(weights, torch.tensor([[0.75]], dtype=torch.float64))
    assert kept.tolist() == [[10, 40, 10, 0, 0, 20]]


@pytest.mark.parametrize("spread", [0.0, 0.01, 20.0])
def test_a_wide_nucleus_is_found_beyond_the_first_size(spread):
    logits = spread * torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(1))
    weights = sampling.token_weights(logits, torch.ones(2, 1))
    kept = sampling.keep_top_p(weights, torch.tensor([[0.9], [0.1]], dtype=torch.float64))
    share = kept.sum(-1) / weights.sum(-1)
    assert share[0] >= 0.9
    assert share[1] >= 0.1
    least = torch.where(kept > 0, kept, 2**41).amin(-1)
    without_least = (kept.sum(-1) - least) / weights.sum(-1)
    assert without_least[0] < 0.9
    assert without_least[1] < 0.1


def test_the_draw_is_the_inverse_cdf_in_token_id_order():
    weights = torch.tensor([[0, 3, 0, 1, 0]])
    numbers = torch.tensor([0.0, 0.7499, 0.75, 1 - 2**-53], dtype=torch.float64)
    drawn = sampling.draw(weights.expand(4, 5).contiguous(), numbers)
    assert drawn.tolist() == [1, 1, 3, 3]


def test_a_token_without_weight_is_never_drawn_however_large_the_sums():
    weights = torch.full((1, 2**18), 2**40)
    weights[0, -1000:] = 0
    number = torch.tensor([1 - 2**-53], dtype=torch.float64)
    assert sampling.draw(weights, number).item() == 2**18 - 1001


def test_masked_logits_weigh_nothing():
    logits = torch.tensor([[0.0, -np.inf, 1.0]])
    assert sampling.token_weights(logits, torch.ones(1, 1))[0, 1] == 0
