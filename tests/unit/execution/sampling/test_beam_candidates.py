"""The candidates of beams against transformers' processors on the log probabilities."""

import math
from typing import Any

import pytest
import torch
from transformers.generation import logits_process as hf

from loraplex.core.plan import RowAdded, RowStep
from loraplex.core.sampling_params import SamplingParams
from loraplex.core.task import Generate
from loraplex.execution.sampling.sampler import Sampler
from loraplex.kernels.dispatch import select_kernels
from loraplex.kernels.reference import ReferenceKernels

VOCAB = 50
CPU = torch.device("cpu")
PROMPT = (7, 8, 9, 7, 8)


@pytest.fixture(params=["fastest", "reference"])
def kernels(request):
    return select_kernels(CPU) if request.param == "fastest" else ReferenceKernels(CPU)


def sampler_of(kernels: Any, *samplings: SamplingParams, tokens: tuple[int, ...] = PROMPT):
    sampler = Sampler(VOCAB, device=CPU, kernels=kernels)
    for slot, sampling in enumerate(samplings):
        sampler.add_row(
            RowAdded(
                slot=slot,
                sequence_id=slot,
                task=Generate(sampling, suppressed_token_ids=(3,)),
                sequence_index=0,
                token_ids=tokens,
                num_prompt_tokens=len(PROMPT),
            )
        )
    return sampler


def step(slot: int = 0, num_candidates: int = 4) -> RowStep:
    return RowStep(slot=slot, start=0, num_tokens=len(PROMPT), num_candidates=num_candidates)


def random_logits(num_rows: int = 1, seed: int = 0) -> torch.Tensor:
    return 3 * torch.randn(num_rows, VOCAB, generator=torch.Generator().manual_seed(seed))


OPTIONS = {
    "plain": ({}, []),
    "penalty": ({"repetition_penalty": 1.7}, [hf.RepetitionPenaltyLogitsProcessor(1.7)]),
    "ngram": ({"no_repeat_ngram_size": 2}, [hf.NoRepeatNGramLogitsProcessor(2)]),
    "bad words": (
        {"bad_token_ids": ((7, 8, 1), (2,))},
        [hf.NoBadWordsLogitsProcessor([[7, 8, 1], [2]])],
    ),
    "bias": (
        {"logit_bias": ((4, 6.0), (9, -3.0))},
        [hf.SequenceBiasLogitsProcessor({(4,): 6.0, (9,): -3.0})],
    ),
    "minimum": ({"min_tokens": 1}, [hf.SuppressTokensLogitsProcessor([3])]),
    "all": (
        {
            "logit_bias": ((7, 9.0), (9, 2.0)),
            "repetition_penalty": 1.7,
            "no_repeat_ngram_size": 3,
            "bad_token_ids": ((5,),),
        },
        [
            hf.SequenceBiasLogitsProcessor({(7,): 9.0, (9,): 2.0}),
            hf.RepetitionPenaltyLogitsProcessor(1.7),
            hf.NoRepeatNGramLogitsProcessor(3),
            hf.NoBadWordsLogitsProcessor([[5]]),
        ],
    ),
}


@pytest.mark.parametrize("option", OPTIONS)
def test_they_are_what_transformers_would_choose_from(kernels, option):
    fields, processors = OPTIONS[option]
    for seed in range(10):
        logits = random_logits(seed=seed)
        sampler = sampler_of(kernels, SamplingParams(temperature=0.3, top_k=1, **fields))
        (result,) = sampler.sample(logits, [step(num_candidates=6)])
        scores = logits.log_softmax(-1)
        for processor in processors:
            scores = processor(torch.tensor([PROMPT]), scores)
        best = scores.topk(6)
        assert [token_id for token_id, _ in result.candidates] == best.indices[0].tolist()
        assert [score for _, score in result.candidates] == best.values[0].tolist()
        assert result.token_ids == ()


def test_equals_come_by_their_id_and_what_may_not_come_is_none(kernels):
    logits = torch.zeros(1, VOCAB)
    sampling = SamplingParams(allowed_token_ids=(40, 3, 9, 30), bad_token_ids=((9,),))
    (result,) = sampler_of(kernels, sampling).sample(logits, [step(num_candidates=10)])
    assert [token_id for token_id, _ in result.candidates] == [3, 30, 40]
    assert result.candidates[0][1] == pytest.approx(-math.log(VOCAB))


def test_a_row_without_any_candidate_fails_alone(kernels):
    nothing = SamplingParams(allowed_token_ids=(2,), bad_token_ids=((2,),))
    results = sampler_of(kernels, nothing, SamplingParams()).sample(
        random_logits(2), [step(0), step(1)]
    )
    assert results[0].error is not None
    assert results[0].candidates == ()
    assert results[1].error is None
    assert len(results[1].candidates) == 4


def test_more_candidates_than_tokens_are_all_tokens(kernels):
    (result,) = sampler_of(kernels, SamplingParams()).sample(
        random_logits(), [step(num_candidates=VOCAB + 5)]
    )
    assert len(result.candidates) == VOCAB


def test_nothing_is_appended_and_given_tokens_are(kernels):
    sampling = SamplingParams(no_repeat_ngram_size=2, frequency_penalty=2.0)
    sampler = sampler_of(kernels, sampling)
    sampler.sample(random_logits(), [step()])
    assert sampler.last_token(0) == PROMPT[-1]
    following = RowStep(slot=0, start=5, num_tokens=1, token_ids=(11,), num_candidates=VOCAB)
    logits = random_logits(seed=1)
    (result,) = sampler.sample(logits, [following])
    assert sampler.last_token(0) == 11
    fresh = sampler_of(kernels, sampling, tokens=(*PROMPT, 11))
    assert fresh.sample(logits, [following]) == [result]
    assert fresh.last_token(0) == 11


def test_company_changes_no_bit(kernels):
    samplings = [SamplingParams(**fields) for fields, _ in OPTIONS.values()]
    logits = random_logits(len(samplings) + 1, seed=4)
    together = sampler_of(kernels, *samplings, SamplingParams())
    steps = [step(slot, 3 + slot) for slot in range(len(samplings))]
    drawing = RowStep(slot=len(samplings), start=0, num_tokens=5)
    results = together.sample(logits, [*steps, drawing])
    for slot, sampling in enumerate(samplings):
        alone = sampler_of(kernels, *([SamplingParams()] * slot), sampling)
        assert alone.sample(logits[slot : slot + 1], [steps[slot]]) == [results[slot]]
    assert len(results[-1].token_ids) == 1
