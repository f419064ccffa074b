"""20,000 draws of each kind against the exact distribution, by Pearson's chi-square test.

The distribution is computed here in float64, step by step as transformers' processors do it. Seeds
are fixed, so a test passes always or never.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from loraplex.core.plan import RowAdded, RowStep
from loraplex.core.sampling_params import SamplingParams
from loraplex.core.task import Generate
from loraplex.execution.sampling.sampler import Sampler
from loraplex.kernels.dispatch import select_kernels

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
NUM_DRAWS = 20_000
LEAST_P_VALUE = 1e-3
"""One test in a thousand of a correct sampler is below it by chance; these seeds are not."""
LEAST_EXPECTED = 5
VOCAB = 24
PROMPT = (5, 2, 2, 3)
OUTPUT = (3, 4, 4, 4, 1, 2)
SUPPRESSED = (0, 9)
LOGITS = torch.linspace(2.5, -2.5, VOCAB)[torch.arange(VOCAB) ^ 3]
"""The tokens of prompt and output are likely, and not in the order of their ids."""

Probabilities = npt.NDArray[np.float64]

CASES: dict[str, dict[str, Any]] = {
    "all": {},
    "hot": {"temperature": 1.7},
    "cold": {"temperature": 0.4},
    "top-k": {"top_k": 5},
    "hot top-k": {"top_k": 9, "temperature": 1.5},
    "top-p": {"top_p": 0.8},
    "narrow top-p": {"top_p": 0.3},
    "min-p": {"min_p": 0.15},
    "repetition": {"repetition_penalty": 1.5},
    "reward": {"repetition_penalty": 0.6},
    "presence": {"presence_penalty": 1.2},
    "frequency": {"frequency_penalty": 0.7},
    "bias": {"logit_bias": ((5, 1.5), (8, -2.0), (20, 2.0))},
    "bans": {"bad_token_ids": ((5,), (2, 8), (1, 2, 7)), "no_repeat_ngram_size": 2},
    "minimum": {"min_tokens": 7},
    "allowed": {"allowed_token_ids": (1, 2, 5, 9, 14, 20)},
    "decay": {"top_p": 0.95, "top_p_decay": 0.9, "top_p_min": 0.2, "top_p_reset_id": 4},
    "top-k and top-p": {"top_k": 8, "top_p": 0.7, "temperature": 1.3},
    "top-p and min-p": {"top_p": 0.9, "min_p": 0.1, "temperature": 0.8},
    "penalties": {
        "repetition_penalty": 1.3,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.4,
        "temperature": 0.9,
    },
    "everything": {
        "temperature": 1.4,
        "top_k": 12,
        "top_p": 0.9,
        "top_p_decay": 0.98,
        "min_p": 0.05,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.2,
        "no_repeat_ngram_size": 3,
        "bad_token_ids": ((6,),),
        "logit_bias": ((2, 1.5), (10, 1.0)),
        "min_tokens": 9,
    },
}


def softmax(scores: Probabilities) -> Probabilities:
    weights = np.exp(scores - scores.max())
    return weights / weights.sum()


def processed(params: SamplingParams) -> Probabilities:
    """The logits after all but temperature, top-k, top-p and min-p."""
    scores = LOGITS.double().numpy().copy()
    for token_id, bias in params.logit_bias:
        scores[token_id] += bias
    tokens = [*PROMPT, *OUTPUT]
    for token_id in set(tokens):
        positive = scores[token_id] > 0
        penalty = params.repetition_penalty
        scores[token_id] = scores[token_id] / penalty if positive else scores[token_id] * penalty
    for token_id in set(OUTPUT):
        scores[token_id] -= params.presence_penalty
        scores[token_id] -= params.frequency_penalty * OUTPUT.count(token_id)
    banned = set(SUPPRESSED) if len(OUTPUT) < params.min_tokens else set()
    size = params.no_repeat_ngram_size
    runs = [tuple(tokens[i : i + size]) for i in range(len(tokens) - size + 1)] if size else []
    for *before, last in [*runs, *params.bad_token_ids]:
        if not before or tokens[-len(before) :] == before:
            banned.add(last)
    if params.allowed_token_ids:
        banned |= set(range(VOCAB)) - set(params.allowed_token_ids)
    scores[list(banned)] = -np.inf
    return scores


def top_p_of(params: SamplingParams) -> float:
    top_p = params.top_p
    for token_id in OUTPUT:
        if token_id == params.top_p_reset_id:
            top_p = params.top_p
        else:
            top_p = max(top_p * params.top_p_decay, params.top_p_min)
    return top_p


def exact(params: SamplingParams) -> Probabilities:
    scores = processed(params) / params.temperature
    order = np.argsort(-scores, kind="stable")
    if params.top_k > 0:
        scores[order[params.top_k :]] = -np.inf
    probabilities = softmax(scores)
    before = np.cumsum(probabilities[order]) - probabilities[order]
    scores[order[before >= top_p_of(params)]] = -np.inf
    probabilities = softmax(scores)
    scores[probabilities < params.min_p * probabilities.max()] = -np.inf
    return softmax(scores)


def p_value(drawn: Sequence[int], probabilities: Probabilities) -> float:
    """Return the p value of Pearson's test; 0 if something came that has no probability."""
    counts = np.bincount(drawn, minlength=len(probabilities)).astype(np.float64)
    if counts[probabilities == 0].any():
        return 0.0
    expected = len(drawn) * probabilities
    # The test is for classes that are not rare: those are put together.
    rare = expected < LEAST_EXPECTED
    counts = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    counts, expected = counts[expected > 0], expected[expected > 0]
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    half = torch.tensor([(len(expected) - 1) / 2, chi_square / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def drawn_by_rows(params: SamplingParams) -> list[int]:
    """Rows that differ in their seeds."""
    sampler = Sampler(VOCAB, device=CPU, kernels=select_kernels(CPU))
    for slot in range(NUM_DRAWS):
        sampler.add_row(
            RowAdded(
                slot=slot,
                sequence_id=slot,
                task=Generate(params, seed=slot * 7919, suppressed_token_ids=SUPPRESSED),
                sequence_index=slot % 3,
                token_ids=PROMPT + OUTPUT,
                num_prompt_tokens=len(PROMPT),
            )
        )
    steps = [RowStep(slot=slot, start=9, num_tokens=1) for slot in range(NUM_DRAWS)]
    results = sampler.sample(LOGITS.expand(NUM_DRAWS, VOCAB).contiguous(), steps)
    return [result.token_ids[0] for result in results]


@pytest.mark.parametrize("case", CASES)
def test_rows_draw_from_the_exact_distribution(case):
    params = SamplingParams(**CASES[case])
    probabilities = exact(params)
    assert (probabilities > 0).sum() > 1
    assert p_value(drawn_by_rows(params), probabilities) > LEAST_P_VALUE


def test_one_row_s_tokens_draw_from_it_too():
    params = SamplingParams(temperature=1.3)
    sampler = Sampler(VOCAB, device=CPU, kernels=select_kernels(CPU))
    sampler.add_row(
        RowAdded(
            slot=0,
            sequence_id=0,
            task=Generate(params, seed=1),
            sequence_index=0,
            token_ids=(1,),
            num_prompt_tokens=1,
        )
    )
    logits, steps = LOGITS.unsqueeze(0).clone(), [RowStep(slot=0, start=0, num_tokens=1)]
    drawn = [sampler.sample(logits, steps)[0].token_ids[0] for _ in range(NUM_DRAWS // 4)]
    assert p_value(drawn, softmax(LOGITS.double().numpy() / 1.3)) > LEAST_P_VALUE
    pairs = [
        first % 4 * 4 + second % 4 for first, second in zip(drawn[::2], drawn[1::2], strict=True)
    ]
    of_four = np.array(
        [softmax(LOGITS.double().numpy() / 1.3)[remainder::4].sum() for remainder in range(4)]
    )
    assert p_value(pairs, np.outer(of_four, of_four).flatten()) > LEAST_P_VALUE


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ({}, {"temperature": 0.9}),
        ({"top_k": 8}, {"top_k": 7}),
        ({"top_p": 0.7}, {"top_p": 0.6}),
        ({"min_p": 0.1}, {"min_p": 0.15}),
        ({}, {"repetition_penalty": 1.05}),
        ({}, {"presence_penalty": 0.1}),
        ({}, {"frequency_penalty": 0.05}),
        ({}, {"logit_bias": ((5, 0.2),)}),
    ],
    ids=str,
)
def test_a_small_mistake_would_be_seen(right, wrong):
    """The draws of nearly the same parameters do not pass for those of the right ones."""
    drawn = drawn_by_rows(SamplingParams(**(right | wrong)))
    assert p_value(drawn, exact(SamplingParams(**right))) < LEAST_P_VALUE
