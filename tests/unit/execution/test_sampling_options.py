"""Every option in one batch is as alone, with drafts as without, and as in transformers."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.generation import logits_process as hf

from loraplex.core.plan import RowAdded, RowResult, RowStep
from loraplex.core.sampling_params import SamplingParams
from loraplex.core.task import Generate
from loraplex.execution.sampling.sampler import Sampler
from loraplex.kernels.dispatch import select_kernels
from loraplex.kernels.reference import ReferenceKernels
from support.examples import examples

VOCAB = 37
CPU = torch.device("cpu")
PROMPT = (5, 6, 7, 5, 6)
SUPPRESSED = (0, 1)

OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.7},
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.6},
    "top_p_decay": {
        "top_p": 0.9,
        "top_p_decay": 0.7,
        "top_p_min": 0.2,
        "top_p_reset_id": 4,
    },
    "min_p": {"min_p": 0.2},
    "repetition_penalty": {"repetition_penalty": 1.4},
    "presence_penalty": {"presence_penalty": 1.0},
    "frequency_penalty": {"frequency_penalty": 1.5},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
    "bad_token_ids": {"bad_token_ids": ((3,), (5, 6), (6, 5), (2, 2))},
    "logit_bias": {"logit_bias": ((2, 3.0), (9, -3.0), (11, 2.0))},
    "allowed_token_ids": {"allowed_token_ids": tuple(range(1, VOCAB, 3))},
    "min_tokens": {"min_tokens": 3},
}
SAMPLINGS = st.lists(
    st.lists(st.sampled_from(list(OPTIONS)), max_size=5).map(
        lambda names: SamplingParams(
            **{key: value for name in names for key, value in OPTIONS[name].items()}
        )
    ),
    min_size=1,
    max_size=6,
)


def added(slot: int, sampling: SamplingParams, output: tuple[int, ...] = ()) -> RowAdded:
    return RowAdded(
        slot=slot,
        sequence_id=slot,
        task=Generate(sampling, seed=slot * 31, suppressed_token_ids=SUPPRESSED),
        sequence_index=0,
        token_ids=PROMPT + output,
        num_prompt_tokens=len(PROMPT),
    )


def sampler_of(*samplings: SamplingParams, fastest: bool = True) -> Sampler:
    kernels = select_kernels(CPU) if fastest else ReferenceKernels(CPU)
    sampler = Sampler(VOCAB, device=CPU, kernels=kernels)
    for slot, sampling in enumerate(samplings):
        sampler.add_row(added(slot, sampling))
    return sampler


def random_logits(num_rows: int, seed: int) -> torch.Tensor:
    return 2 * torch.randn(num_rows, VOCAB, generator=torch.Generator().manual_seed(seed))


def step(slot: int, num_outputs: int = 0) -> RowStep:
    return RowStep(slot=slot, start=len(PROMPT) - 1 + num_outputs, num_tokens=1, num_logprobs=2)


def token_of(result: RowResult) -> int:
    assert result.error is None
    (token_id,) = result.token_ids
    return token_id


@examples(0.6)
@given(samplings=SAMPLINGS, seed=st.integers(0, 2**32))
def test_a_row_is_as_alone_over_many_steps_and_after_it_was_away(samplings, seed):
    together = sampler_of(*samplings)
    outputs: list[tuple[int, ...]] = [()] * len(samplings)
    for position in range(6):
        logits = random_logits(len(samplings), seed + position)
        before = logits.clone()
        results = together.sample(logits, [step(slot, position) for slot in range(len(samplings))])
        assert torch.equal(logits, before)
        for slot, sampling in enumerate(samplings):
            one = Sampler(VOCAB, device=CPU)
            one.add_row(added(slot, sampling, outputs[slot]))
            (expected,) = one.sample(logits[slot : slot + 1], [step(slot, position)])
            assert results[slot].token_ids == expected.token_ids
            outputs[slot] += (token_of(results[slot]),)


@examples(0.6)
@given(samplings=SAMPLINGS, seed=st.integers(0, 2**32), data=st.data())
def test_drafts_change_no_token(samplings, seed, data):
    num_tokens = 5
    logits = [random_logits(num_tokens, seed + slot) for slot in range(len(samplings))]
    plain = sampler_of(*samplings)
    tokens: list[list[int]] = [[] for _ in samplings]
    for position in range(num_tokens):
        rows = torch.stack([of_row[position] for of_row in logits])
        results = plain.sample(rows, [step(slot, position) for slot in range(len(samplings))])
        for of_row, result in zip(tokens, results, strict=True):
            of_row.append(token_of(result))
    drafted = sampler_of(*samplings)
    steps, expected = [], []
    for slot, of_row in enumerate(tokens):
        right = data.draw(st.integers(0, num_tokens - 1), label="right drafts")
        wrong = () if right == num_tokens - 1 else ((of_row[right] + 1) % VOCAB,)
        drafts = (*of_row[:right], *wrong)
        steps.append(
            RowStep(
                slot=slot, start=len(PROMPT) - 1, num_tokens=1 + len(drafts), draft_token_ids=drafts
            )
        )
        expected.append(tuple(of_row[: right + 1]))
    rows = torch.cat([of_row[: s.num_tokens] for of_row, s in zip(logits, steps, strict=True)])
    results = drafted.sample(rows, steps)
    assert [result.token_ids for result in results] == expected
    following = drafted.sample(
        torch.stack([of_row[-1] for of_row in logits]),
        [step(slot, len(expected[slot])) for slot in range(len(samplings))],
    )
    for slot, sampling in enumerate(samplings):
        resumed = Sampler(VOCAB, device=CPU)
        resumed.add_row(added(slot, sampling, expected[slot]))
        (one,) = resumed.sample(logits[slot][-1:], [step(slot, len(expected[slot]))])
        assert one.token_ids == following[slot].token_ids


@pytest.mark.parametrize("fastest", [True, False])
def test_in_transformers_order(fastest):
    """Each processor's effect depends on those before it."""
    sampling = SamplingParams(
        temperature=0.0,
        logit_bias=((5, 2.5), (7, -1.5), (8, 4.0)),
        repetition_penalty=1.8,
        no_repeat_ngram_size=3,
        bad_token_ids=((8,), (6, 9)),
    )
    processors = [
        hf.SequenceBiasLogitsProcessor({(5,): 2.5, (7,): -1.5, (8,): 4.0}),
        hf.RepetitionPenaltyLogitsProcessor(1.8),
        hf.NoRepeatNGramLogitsProcessor(3),
        hf.NoBadWordsLogitsProcessor([[8], [6, 9]]),
    ]
    for seed in range(40):
        logits = random_logits(1, seed)
        scores = logits.clone()
        for processor in processors:
            scores = processor(torch.tensor([PROMPT]), scores)
        (result,) = sampler_of(sampling, fastest=fastest).sample(logits, [step(0)])
        assert token_of(result) == int(scores.argmax())


def test_only_allowed_tokens_come():
    allowed = (4, 33, 36)
    sampler = sampler_of(SamplingParams(allowed_token_ids=allowed, temperature=5.0))
    drawn = {token_of(sampler.sample(random_logits(1, i), [step(0, i)])[0]) for i in range(60)}
    assert drawn == set(allowed)


def test_tokens_out_of_the_vocabulary_have_no_effect():
    strange = SamplingParams(
        temperature=0.0,
        logit_bias=((VOCAB, 100.0), (VOCAB + 5, -100.0)),
        bad_token_ids=((VOCAB,), (6, VOCAB), (-1,)),
        allowed_token_ids=(-1, 3, 9, VOCAB + 64),
    )
    usual = SamplingParams(temperature=0.0, allowed_token_ids=(3, 9))
    logits = random_logits(1, 3)
    strange_result, usual_result = (
        sampler_of(s).sample(logits, [step(0)])[0] for s in (strange, usual)
    )
    assert strange_result.token_ids == usual_result.token_ids


def test_top_p_falls_with_the_output():
    """Two tokens share the weight: both come at first, only the likelier one later."""
    sampling = SamplingParams(top_p=1.0, top_p_decay=0.5, top_p_min=0.4)
    logits = torch.full((1, VOCAB), -torch.inf)
    logits[0, 3], logits[0, 4] = 0.1, 0.0
    firsts, seconds = set(), set()
    for slot in range(40):
        sampler = Sampler(VOCAB, device=CPU)
        sampler.add_row(added(slot, sampling))
        firsts.add(token_of(sampler.sample(logits, [step(slot)])[0]))
        seconds.add(token_of(sampler.sample(logits, [step(slot, 1)])[0]))
    assert firsts == {3, 4}
    assert seconds == {3}
