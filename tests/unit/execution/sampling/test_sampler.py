import math
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from loraplex.core.plan import RowAdded, RowStep, Wanted
from loraplex.core.sampling_params import SamplingParams
from loraplex.core.task import Generate
from loraplex.execution.sampling.rows import num_logits_rows
from loraplex.execution.sampling.sampler import Sampler
from loraplex.kernels.dispatch import select_kernels
from support.examples import examples
from support.naming import naming

VOCAB = 8
GREEDY = SamplingParams(temperature=0.0)


def make_sampler(vocab_size: int = VOCAB) -> Sampler:
    return Sampler(vocab_size, device=torch.device("cpu"))


def row(slot=0, tokens=(1, 2, 3), sampling=GREEDY, num_prompt_tokens=None, **kwargs) -> RowAdded:
    kwargs = {"seed": 1} | kwargs
    return RowAdded(
        slot=slot,
        sequence_id=slot,
        sequence_index=kwargs.pop("sequence_index", 0),
        task=Generate(sampling, **kwargs),
        token_ids=tuple(tokens),
        num_prompt_tokens=len(tokens) if num_prompt_tokens is None else num_prompt_tokens,
    )


def step(slot=0, start=0, num_tokens=3, **kwargs) -> RowStep:
    return RowStep(slot=slot, start=start, num_tokens=num_tokens, **kwargs)


def logits_for(*token_ids: int, vocab_size=VOCAB) -> torch.Tensor:
    """One row per token, which is the most likely one by far."""
    logits = torch.zeros(len(token_ids), vocab_size)
    logits[range(len(token_ids)), list(token_ids)] = 20.0
    return logits


def sample_one(sampling, logits, **kwargs) -> tuple[int, ...]:
    sampler = make_sampler(logits.shape[1])
    sampler.add_row(row(sampling=sampling, **kwargs))
    return sampler.sample(logits, [step()])[0].token_ids


class TestWhichRowsSample:
    def test_rows_without_logits_give_nothing(self):
        sampler = make_sampler()
        sampler.add_row(row(0))
        sampler.add_row(row(1))
        steps = [step(0, wanted=Wanted.NONE), step(1)]
        assert [num_logits_rows(s) for s in steps] == [0, 1]
        results = sampler.sample(logits_for(5), steps)
        assert [(r.slot, r.token_ids) for r in results] == [(0, ()), (1, (5,))]

    def test_no_row_at_all_needs_logits(self):
        sampler = make_sampler()
        sampler.add_row(row())
        results = sampler.sample(torch.zeros(0, VOCAB), [step(wanted=Wanted.NONE)])
        assert results[0].token_ids == ()

    def test_the_last_token_is_remembered(self):
        sampler = make_sampler()
        sampler.add_row(row())
        assert sampler.last_token(0) == 3
        sampler.sample(logits_for(6), [step()])
        assert sampler.last_token(0) == 6

    def test_a_slot_can_be_used_again(self):
        sampler = make_sampler()
        sampler.add_row(row(tokens=(1,)))
        sampler.remove_row(0)
        sampler.add_row(row(tokens=(7,)))
        assert sampler.last_token(0) == 7

    def test_the_logits_are_not_changed(self):
        sampler = make_sampler()
        sampling = SamplingParams(top_k=2, repetition_penalty=1.5, min_tokens=1)
        sampler.add_row(row(sampling=sampling, suppressed_token_ids=(0,)))
        logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(0))
        before = logits.clone()
        sampler.sample(logits, [step()])
        assert torch.equal(logits, before)


class TestRowsThatTakeTheLikeliest:
    """Steps of nothing but them go a shorter way."""

    def sampler_of(self, *samplings) -> Sampler:
        sampler = make_sampler()
        for slot, sampling in enumerate(samplings):
            sampler.add_row(row(slot, sampling=sampling, suppressed_token_ids=(4,)))
        return sampler

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_company_of_another_kind_changes_nothing(self, dtype):
        logits = logits_for(5, 4, 0).to(dtype)
        steps = [step(slot) for slot in range(3)]
        alone = self.sampler_of(GREEDY, GREEDY, GREEDY)
        mixed = self.sampler_of(GREEDY, GREEDY, SamplingParams(temperature=0.5))
        for _ in range(2):
            plain, others = alone.sample(logits, steps), mixed.sample(logits, steps)
            assert [result.token_ids for result in plain] == [(5,), (4,), (0,)]
            assert plain[:2] == others[:2]
        assert [alone.last_token(slot) for slot in range(3)] == [5, 4, 0]

    def test_each_row_finds_its_own_logits_between_others(self):
        """A chunk that needs none, one that is scored, and drafts: rows of 0, 3 and 2 logits."""
        hot = SamplingParams(temperature=0.5)
        scored = SamplingParams(temperature=0.0, prompt_logprobs=0)
        sampler = self.sampler_of(GREEDY, GREEDY, scored, GREEDY, hot, GREEDY)
        steps = [
            step(0, wanted=Wanted.NONE),
            step(1),
            step(2, wanted=Wanted.ALL),
            step(3, num_tokens=2, draft_token_ids=(6,)),
            step(4),
            step(5),
        ]
        logits = logits_for(7, 2, 3, 1, 6, 5, 0, 4)
        results = sampler.sample(logits, steps)
        assert [r.slot for r in results] == [0, 1, 2, 3, 4, 5]
        assert [r.token_ids for r in results] == [(), (7,), (1,), (6, 5), (0,), (4,)]
        assert [sampler.last_token(slot) for slot in range(6)] == [3, 7, 1, 5, 0, 4]

    def test_a_minimum_of_tokens_still_suppresses(self):
        sampler = self.sampler_of(SamplingParams(temperature=0.0, min_tokens=1))
        chosen = [sampler.sample(logits_for(4), [step()])[0].token_ids for _ in range(2)]
        assert chosen[0] != (4,)
        assert chosen[1] == (4,)

    def test_a_penalty_still_counts(self):
        sampler = self.sampler_of(SamplingParams(temperature=0.0, frequency_penalty=2.0))
        logits = logits_for(5) / 20
        chosen = [sampler.sample(logits, [step()])[0].token_ids for _ in range(2)]
        assert chosen[0] == (5,)
        assert chosen[1] != (5,)

    def test_log_probabilities_are_given(self):
        (result,) = self.sampler_of(GREEDY).sample(logits_for(5), [step(num_logprobs=1)])
        assert [logprob.token_id for logprob in result.logprobs] == [5]

    def test_drafts_are_tried(self):
        drafted = step(start=2, num_tokens=3, draft_token_ids=(4, 5))
        (result,) = self.sampler_of(GREEDY).sample(logits_for(4, 5, 6), [drafted])
        assert result.token_ids == (4, 5, 6)

    def test_log_probabilities_of_narrow_logits_are_those_of_their_values(self):
        logits = torch.linspace(-3, 3, VOCAB).bfloat16().unsqueeze(0)
        scored = step(num_logprobs=1)
        (narrow,) = self.sampler_of(GREEDY).sample(logits, [scored])
        (wide,) = self.sampler_of(GREEDY).sample(logits.float(), [scored])
        assert narrow == wide

    @pytest.mark.parametrize("value", [math.nan, math.inf])
    def test_only_the_row_that_is_not_finite_fails(self, value):
        sampler = self.sampler_of(GREEDY, GREEDY)
        logits = logits_for(5, 6)
        logits[0, 2] = value
        failed, good = sampler.sample(logits, [step(0), step(1)])
        assert failed.error is not None
        assert (failed.slot, failed.token_ids) == (0, ())
        assert (good.slot, good.token_ids, good.error) == (1, (6,), None)
        assert [sampler.last_token(slot) for slot in (0, 1)] == [3, 6]


class TestDrafts:
    def sample(self, drafts, chosen, sampling=GREEDY, num_logprobs=None):
        sampler = make_sampler()
        sampler.add_row(row(sampling=sampling))
        drafted = step(
            start=2,
            num_tokens=1 + len(drafts),
            draft_token_ids=drafts,
            num_logprobs=num_logprobs,
        )
        assert num_logits_rows(drafted) == 1 + len(drafts)
        result = sampler.sample(logits_for(*chosen), [drafted])[0]
        assert sampler.last_token(0) == result.token_ids[-1]
        return result

    @pytest.mark.parametrize(
        ("drafts", "chosen", "accepted"),
        [
            ((4, 5), (4, 5, 6), (4, 5, 6)),
            ((4, 5), (4, 7, 6), (4, 7)),
            ((4, 5), (7, 5, 6), (7,)),
        ],
    )
    def test_drafts_are_accepted_as_long_as_they_are_what_would_be_drawn(
        self, drafts, chosen, accepted
    ):
        result = self.sample(drafts, chosen, num_logprobs=0)
        assert result.token_ids == accepted
        assert [logprob.token_id for logprob in result.logprobs] == list(accepted)
        assert self.sample(drafts, chosen).token_ids == accepted, "needs the likeliest only"

    def test_speculation_changes_no_token(self):
        sampling = SamplingParams(frequency_penalty=1.0, repetition_penalty=1.2, top_p=0.9)
        generator = torch.Generator().manual_seed(0)
        logits = torch.randn(4, VOCAB, generator=generator)
        plain = make_sampler()
        plain.add_row(row(sampling=sampling))
        tokens = [
            plain.sample(logits[i : i + 1], [step(start=2 + i, num_tokens=1)])[0].token_ids[0]
            for i in range(4)
        ]
        sampler = make_sampler()
        sampler.add_row(row(sampling=sampling))
        drafted = step(start=2, num_tokens=4, draft_token_ids=tuple(tokens[:3]))
        assert sampler.sample(logits, [drafted])[0].token_ids == tuple(tokens)


class TestGreedy:
    def test_takes_the_most_likely_and_the_lowest_id_of_equals(self):
        assert sample_one(GREEDY, torch.tensor([[0.0, 3.0, 1.0, 3.0]])) == (1,)

    def test_top_k_one_is_greedy(self):
        assert sample_one(SamplingParams(top_k=1), torch.tensor([[0.0, 3.0, 3.0, 2.9]])) == (1,)

    def test_penalties_apply(self):
        sampling = SamplingParams(temperature=0.0, repetition_penalty=2.0)
        logits = torch.tensor([[0.0, 3.0, 1.0, 2.0]])
        assert sample_one(sampling, logits, tokens=(1,)) == (3,)


class TestPenaltiesOverTime:
    def test_outputs_count_prompts_do_not(self):
        sampler = make_sampler()
        sampling = SamplingParams(temperature=0.0, frequency_penalty=1.0)
        sampler.add_row(row(tokens=(1, 1, 1), sampling=sampling))
        logits = torch.zeros(1, VOCAB)
        logits[0, 1], logits[0, 2] = 2.5, 1.2
        tokens = [
            sampler.sample(logits, [step(start=2 + i, num_tokens=1)])[0].token_ids[0]
            for i in range(4)
        ]
        assert tokens == [1, 1, 2, 1]

    def test_a_resumed_row_continues_as_if_it_had_never_left(self):
        sampling = SamplingParams(presence_penalty=1.5, repetition_penalty=1.3, temperature=0.8)
        generator = torch.Generator().manual_seed(2)
        logits = torch.randn(12, VOCAB, generator=generator)
        whole, parts = make_sampler(), make_sampler()
        for sampler in (whole, parts):
            sampler.add_row(row(sampling=sampling, seed=5))
        tokens = [1, 2, 3]
        for i in range(12):
            steps = [step(start=2 + i, num_tokens=1)]
            expected = whole.sample(logits[i : i + 1], steps)[0].token_ids
            if i % 4 == 3:
                parts.remove_row(0)
                parts.add_row(row(tokens=tokens, num_prompt_tokens=3, sampling=sampling, seed=5))
            assert parts.sample(logits[i : i + 1], steps)[0].token_ids == expected
            tokens += expected


class TestMinTokens:
    def test_end_tokens_wait_for_min_tokens(self):
        sampler = make_sampler()
        sampling = SamplingParams(temperature=0.0, min_tokens=2)
        sampler.add_row(row(sampling=sampling, suppressed_token_ids=(5, 6)))
        logits = logits_for(5)
        logits[0, 6], logits[0, 4] = 19.0, 1.0
        tokens = [
            sampler.sample(logits, [step(start=2 + i, num_tokens=1)])[0].token_ids[0]
            for i in range(3)
        ]
        assert tokens == [4, 4, 5]

    def test_nothing_left_is_the_row_s_own_error(self):
        sampler = make_sampler(vocab_size=2)
        sampling = SamplingParams(min_tokens=1)
        sampler.add_row(row(0, (0,), sampling, suppressed_token_ids=(0, 1)))
        sampler.add_row(row(1, (0,)))
        results = sampler.sample(torch.zeros(2, 2), [step(0), step(1)])
        assert results[0].error is not None
        assert results[0].error.code == "invalid_parameter"
        assert results[0].error.param == "min_tokens"
        assert results[1].token_ids == (0,)


class TestContradictions:
    """Parameters that leave no token are the client's error, not the server's."""

    @pytest.mark.parametrize(
        ("sampling", "said", "param"),
        [
            (SamplingParams(bad_token_ids=((0,), (1,))), "bad_words", "bad_words"),
            (SamplingParams(repetition_penalty=1e-40), "repetition_penalty", "repetition_penalty"),
            (
                SamplingParams(allowed_token_ids=(0,), logit_bias=((0, -math.inf),)),
                "allowed_token_ids, logit_bias",
                None,
            ),
        ],
    )
    def test_the_error_names_what_takes_tokens_away(self, sampling, said, param):
        sampler = make_sampler(vocab_size=2)
        sampler.add_row(row(0, (0,), sampling))
        (result,) = sampler.sample(torch.ones(1, 2), [step(0)])
        assert result.error is not None
        assert result.error.code == "invalid_parameter"
        assert re.search(naming(said), result.error.message)
        assert result.error.param == param


class TestFailures:
    @pytest.mark.parametrize("bad", [math.nan, math.inf])
    def test_bad_logits_fail_their_row_only(self, bad):
        sampler = make_sampler()
        for slot in range(3):
            sampler.add_row(row(slot, sampling=SamplingParams(logprobs=1)))
        logits = logits_for(4, 5, 6)
        logits[1, 0] = bad
        results = sampler.sample(logits, [step(slot, num_logprobs=1) for slot in range(3)])
        assert [r.token_ids for r in results] == [(4,), (), (6,)]
        assert results[1].error is not None
        assert results[1].error.code == "row_failed"
        assert results[0].error is None
        assert results[2].logprobs[0].token_id == 6

    def test_masked_tokens_are_no_failure(self):
        logits = torch.full((1, VOCAB), -math.inf)
        logits[0, 3] = 0.0
        assert sample_one(SamplingParams(), logits) == (3,)

    def test_everything_masked_is_a_failure(self):
        sampler = make_sampler()
        sampler.add_row(row())
        result = sampler.sample(torch.full((1, VOCAB), -math.inf), [step()])[0]
        assert result.error is not None


class TestRandomness:
    def test_tokens_follow_the_distribution(self):
        sampler, num_draws = make_sampler(5), 5000
        logits = torch.tensor([[0.1, 1.2, -0.7, 0.5, 2.0]])
        sampling = SamplingParams(temperature=1.3)
        for slot in range(num_draws):
            sampler.add_row(row(slot, (0,), sampling, seed=slot * 7919))
        steps = [step(slot, num_tokens=1) for slot in range(num_draws)]
        results = sampler.sample(logits.expand(num_draws, 5).contiguous(), steps)
        counts = torch.bincount(torch.tensor([r.token_ids[0] for r in results]), minlength=5)
        expected = num_draws * (logits[0] / 1.3).softmax(-1)
        chi_square = float(((counts - expected) ** 2 / expected).sum())
        assert chi_square < 18.5  # 99.9 % quantile, 4 degrees of freedom

    def test_successive_outputs_and_sequences_draw_different_numbers(self):
        logits = torch.zeros(1, 10_000)
        drawn = set()
        for sequence_index in range(4):
            sampler = make_sampler(10_000)
            sampler.add_row(row(sampling=SamplingParams(), sequence_index=sequence_index))
            for i in range(4):
                steps = [step(start=2 + i, num_tokens=1)]
                drawn |= set(sampler.sample(logits, steps)[0].token_ids)
        assert len(drawn) == 16

    def test_the_seed_alone_decides(self):
        logits = torch.zeros(1, 10_000)
        drawn = [sample_one(SamplingParams(), logits, seed=seed) for seed in (1, 1, 2, -1)]
        assert drawn[0] == drawn[1]
        assert len(set(drawn)) == 3


PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.5, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 3, 100]),
    top_p=st.sampled_from([0.1, 0.7, 1.0]),
    min_p=st.sampled_from([0.0, 0.1]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    presence_penalty=st.sampled_from([0.0, 0.5]),
    min_tokens=st.sampled_from([0, 2]),
)


@examples(0.4)
@given(params=st.lists(PARAMS, min_size=1, max_size=6), seed=st.integers(0, 2**32))
def test_a_row_s_token_does_not_depend_on_its_company(params, seed):
    logits = 3 * torch.randn(len(params), 40, generator=torch.Generator().manual_seed(seed))
    together = make_sampler(40)
    rows = [
        row(slot, (slot, 5, 5, 9), p, 3, seed=seed + slot, suppressed_token_ids=(0, 1, 2))
        for slot, p in enumerate(params)
    ]
    for added in rows:
        together.add_row(added)
    steps = [step(slot, num_logprobs=2) for slot in range(len(params))]
    results = together.sample(logits, steps)
    for slot, added in enumerate(rows):
        alone = make_sampler(40)
        alone.add_row(added)
        assert alone.sample(logits[slot : slot + 1], [steps[slot]]) == [results[slot]]


@pytest.mark.parametrize("seed", range(6))
def test_every_backend_chooses_the_reference_s_tokens(seed):
    """Many steps of rows with all kinds of options, logits with ties and masked tokens."""
    vocab_size, num_rows = 3000, 24
    generator = torch.Generator().manual_seed(seed)
    params = [
        SamplingParams(
            temperature=(0.0, 0.7, 1.0, 1.8)[slot % 4],
            top_k=(0, 1, 50, 2999, 10**6)[slot % 5],
            top_p=(1.0, 0.9, 0.4)[slot // 2 % 3],
            min_p=(0.0, 0.0, 0.1)[slot // 3 % 3],
            repetition_penalty=(1.0, 1.0, 1.2)[slot // 4 % 3],
            frequency_penalty=(0.0, 0.3)[slot // 5 % 2],
            min_tokens=(0, 5)[slot // 7 % 2],
        )
        for slot in range(num_rows)
    ]
    cpu = torch.device("cpu")
    reference = Sampler(vocab_size, device=cpu)
    native = Sampler(vocab_size, device=cpu, kernels=select_kernels(cpu))
    for sampler in (reference, native):
        for slot, p in enumerate(params):
            sampler.add_row(
                row(slot, (slot, 5, 5), p, 2, seed=seed * 99 + slot, suppressed_token_ids=(7, 9))
            )
    for position in range(3, 40):
        logits = 6 * torch.randn(num_rows, vocab_size, generator=generator)
        logits[::3] = (logits[::3] * 2).round() / 2
        logits[1::5, ::2] = -torch.inf
        steps = [step(slot, position, 1, num_logprobs=3) for slot in range(num_rows)]
        before = logits.clone()
        got, expected = native.sample(logits, steps), reference.sample(logits, steps)
        assert torch.equal(logits, before)
        for one, other in zip(got, expected, strict=True):
            assert one.token_ids == other.token_ids
            (one_logprob,), (other_logprob,) = one.logprobs, other.logprobs
            assert one_logprob.rank == other_logprob.rank
            assert one_logprob.logprob == pytest.approx(other_logprob.logprob, abs=1e-5)
            assert [i for i, _ in one_logprob.top] == [i for i, _ in other_logprob.top]


class TestLogprobs:
    def test_are_those_of_the_model_whatever_the_sampling(self):
        sampler = make_sampler()
        sampling = SamplingParams(temperature=0.0, repetition_penalty=5.0, min_tokens=1)
        sampler.add_row(row(tokens=(7,), sampling=sampling, suppressed_token_ids=(6,)))
        logits = torch.tensor([[0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]])
        result = sampler.sample(logits, [step(num_logprobs=3)])[0]
        expected = logits.double().log_softmax(-1)[0]
        (logprob,) = result.logprobs
        assert (logprob.token_id, logprob.rank) == (5, 3)
        assert logprob.logprob == pytest.approx(float(expected[5]), abs=1e-5)
        assert [token_id for token_id, _ in logprob.top] == [7, 6, 5]
        assert logprob.top[0][1] == pytest.approx(float(expected[7]), abs=1e-5)

    def test_rows_need_different_numbers_or_none(self):
        sampler = make_sampler()
        for slot in range(4):
            sampler.add_row(row(slot))
        wanted = [None, 0, 2, 20]
        steps = [step(slot, num_logprobs=n) for slot, n in enumerate(wanted)]
        results = sampler.sample(logits_for(4, 5, 6, 7), steps)
        assert results[0].logprobs == ()
        assert [len(r.logprobs[0].top) for r in results[1:]] == [0, 2, VOCAB]

    def test_equally_likely_tokens_come_in_id_order_and_share_a_rank(self):
        sampler = make_sampler(4)
        sampler.add_row(row(tokens=(0,), sampling=GREEDY))
        result = sampler.sample(torch.tensor([[1.0, 2.0, 2.0, 2.0]]), [step(num_logprobs=4)])[0]
        assert [token_id for token_id, _ in result.logprobs[0].top] == [1, 2, 3, 0]
        assert result.logprobs[0].rank == 1


class TestPromptLogprobs:
    def add(self, tokens=(1, 2, 3, 4), **kwargs):
        sampler = make_sampler()
        sampling = SamplingParams(temperature=0.0, prompt_logprobs=1)
        sampler.add_row(row(tokens=tokens, sampling=sampling, **kwargs))
        return sampler

    def test_a_whole_prompt(self):
        whole = step(num_tokens=4, wanted=Wanted.ALL, num_logprobs=0)
        assert num_logits_rows(whole) == 4
        result = self.add().sample(logits_for(2, 3, 7, 5), [whole])[0]
        assert result.token_ids == (5,)
        assert [(p.token_id, p.rank) for p in result.prompt_logprobs] == [(2, 1), (3, 1), (4, 2)]
        assert [p.top[0][0] for p in result.prompt_logprobs] == [2, 3, 7]
        assert [p.token_id for p in result.logprobs] == [5]

    def test_a_chunk_that_does_not_end_the_prompt_samples_nothing(self):
        sampler = self.add()
        chunks = [
            step(num_tokens=3, wanted=Wanted.ALL),
            step(start=3, num_tokens=1, wanted=Wanted.ALL),
        ]
        first = sampler.sample(logits_for(2, 3, 7), [chunks[0]])[0]
        assert first.token_ids == ()
        assert [p.token_id for p in first.prompt_logprobs] == [2, 3, 4]
        last = sampler.sample(logits_for(5), [chunks[1]])[0]
        assert last.token_ids == (5,)
        assert last.prompt_logprobs == ()

    def test_beside_other_rows(self):
        sampler = self.add()
        sampler.add_row(row(1))
        steps = [step(1), step(0, num_tokens=4, wanted=Wanted.ALL)]
        results = sampler.sample(logits_for(6, 2, 3, 7, 5), steps)
        assert [r.token_ids for r in results] == [(6,), (5,)]
        assert [p.token_id for p in results[1].prompt_logprobs] == [2, 3, 4]
