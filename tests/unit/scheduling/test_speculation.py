"""Draft tokens in an engine on fake parts: the same tokens, and no other row pays for them."""

import collections

import msgspec
import pytest

from loraplex.core.cache import Blocks
from loraplex.core.plan import RowResult, StepResult
from loraplex.core.sampling_params import SamplingParams
from loraplex.core.scheduler_settings import BatchSchedulerPolicy, SchedulerSettings
from loraplex.scheduling.prompt_lookup import NgramIndex
from loraplex.scheduling.speculation import MAX_INDEXED_TOKENS, needed_share
from support.capacities import changed_capacity
from support.fake_engine import FakeEngine
from support.fake_model import FakeModel
from support.fake_runner import FAKE_CAPACITY, FakeRunner, FakeStep, fake_logprob

FEW_TOKENS = FakeModel(vocab_size=3)
"""Its text repeats often."""


def fake_engine(*, model=FEW_TOKENS, num_draft_tokens=4, settings=None, **capacity):
    capacity = {"block_size": 4, "num_blocks": 64, "max_num_seqs": 4, **capacity}
    fakes = changed_capacity(FAKE_CAPACITY, **capacity)
    values = {"num_draft_tokens": num_draft_tokens, **(settings or {})}
    return FakeEngine(fakes, SchedulerSettings(**values), model=model)


def drafts_of(fakes):
    return [row.draft_token_ids for plan in fakes.runner.plans for row in plan.rows]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_the_tokens_are_those_without_drafts(temperature, block_size):
    fakes = fake_engine(block_size=block_size, num_blocks=256)
    sampling = SamplingParams(max_tokens=60, temperature=temperature, seed=3, logprobs=2, n=2)
    request_ids = [fakes.add(prompt, sampling=sampling) for prompt in ([1, 2, 1], [2, 2, 2, 1])]
    fakes.run()
    for request_id in request_ids:
        for index in range(2):
            assert fakes.tokens(request_id, index) == fakes.alone(request_id, index)
        deltas = [d for o in fakes.completions[request_id].outputs for d in o.deltas]
        for delta in deltas:
            assert delta.logprobs == tuple(fake_logprob(t, 2) for t in delta.token_ids)
    stats = fakes.engine.stats()
    assert 0 < stats.accepted_tokens < stats.draft_tokens
    assert stats.generation_tokens == 240
    timings = [fakes.completions[request_id].outputs[-1].timing for request_id in request_ids]
    assert sum(t.num_draft_tokens for t in timings) == stats.draft_tokens
    assert sum(t.num_accepted_tokens for t in timings) == stats.accepted_tokens


def test_fewer_steps_where_the_text_repeats():
    steps = {}
    for num_draft_tokens in (0, 4):
        fakes = fake_engine(model=FakeModel(vocab_size=2), num_draft_tokens=num_draft_tokens)
        fakes.add([1], max_tokens=50)
        fakes.run()
        steps[num_draft_tokens] = fakes.engine.stats().steps
    assert steps[0] == 50
    assert steps[4] <= 14  # only one token can be chosen: every draft token is accepted


def test_the_share_that_drafts_need_grows_with_the_step():
    assert [needed_share(count, 12) for count in (1, 12, 36)] == [1 / 13, 1 / 2, 3 / 4]
    assert needed_share(512, 0) == 0.0, "nothing is known of the device"


def test_a_large_step_has_drafts_only_of_sequences_whose_drafts_are_accepted():
    """A third of the draft tokens are accepted, and all of them where one token can be chosen."""
    drafted = {}
    for vocab_size in (2, 3):
        for num_balanced_tokens in (0, 1, 100):
            fakes = fake_engine(
                model=FakeModel(vocab_size=vocab_size), num_balanced_tokens=num_balanced_tokens
            )
            request_ids = [fakes.add([1] * (1 + number), max_tokens=60) for number in range(4)]
            fakes.run()
            drafted[vocab_size, num_balanced_tokens] = fakes.engine.stats().draft_tokens
            assert all(fakes.tokens(each) == fakes.alone(each) for each in request_ids)
    assert drafted[2, 1] == drafted[2, 100] == drafted[2, 0]
    assert 0 < drafted[3, 1] < drafted[3, 0] / 4
    assert drafted[3, 100] == drafted[3, 0]


def test_a_request_may_enable_or_disable_drafts():
    for own, settings, expected in ((3, 0, True), (0, 3, False), (None, 3, True), (None, 0, False)):
        fakes = fake_engine(num_draft_tokens=settings)
        fakes.add([1, 2, 1], sampling=SamplingParams(max_tokens=20, num_draft_tokens=own, seed=1))
        fakes.run()
        assert any(drafts_of(fakes)) == expected
        assert all(len(drafts) <= 3 for drafts in drafts_of(fakes))


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 7])
def test_no_draft_goes_beyond_the_end(max_tokens):
    fakes = fake_engine(model=FakeModel(vocab_size=2), max_model_len=12)
    for prompt in ([1] * 3, [1] * 9):
        request_id = fakes.add(prompt, max_tokens=max_tokens)
        fakes.run()
        num_expected = min(max_tokens, 12 - len(prompt))
        assert fakes.tokens(request_id) == [1] * num_expected
        assert fakes.completions[request_id].finish_reasons == {0: "length"}
    for plan in fakes.runner.plans:
        for row in plan.rows:
            assert row.start + row.num_tokens < 12


def test_a_stop_within_accepted_draft_tokens():
    """The tokens after it are dropped, and nothing of them is published."""
    model = FakeModel(vocab_size=2)
    fakes = fake_engine(model=model, num_draft_tokens=8)
    sampling = SamplingParams(max_tokens=40, stop_token_sequences=((1,) * 9,), seed=1)
    request_id = fakes.add([1, 1, 1], sampling=sampling)
    fakes.run()
    assert fakes.tokens(request_id) == [1] * 9
    assert fakes.completions[request_id].finish_reasons == {0: "stop"}
    assert max(map(len, drafts_of(fakes))) == 8
    # The last of the 12 tokens was an accepted draft token: its KV is there, too.
    assert fakes.engine.stats().blocks_cached == 3
    again = fakes.add([1] * 20, max_tokens=1)
    fakes.run()
    assert fakes.completions[again].outputs[-1].timing.num_cached_tokens == 12


def test_other_rows_come_before_draft_tokens():
    """The budget is 6: two rows that decode, and a prompt of 40 tokens takes the rest."""
    fakes = fake_engine(settings={"max_num_batched_tokens": 6}, model=FakeModel(vocab_size=2))
    fakes.add([1], max_tokens=30)
    fakes.add([1], max_tokens=30)
    fakes.step(4)
    assert sum(row.num_tokens for row in fakes.runner.plans[-1].rows) == 6
    assert any(row.draft_token_ids for row in fakes.runner.plans[-1].rows)
    fakes.add([1] * 40, max_tokens=1)
    fakes.step()
    rows = fakes.runner.plans[-1].rows
    assert [(row.num_tokens, row.draft_token_ids) for row in rows] == [(1, ()), (1, ()), (4, ())]
    fakes.run()


def test_no_draft_takes_the_block_that_another_row_needs():
    """Draft tokens cause no preemption, even in a pool that is hardly large enough."""
    preemptions = {}
    for num_draft_tokens in (0, 6):
        fakes = fake_engine(
            model=FakeModel(vocab_size=2), num_draft_tokens=num_draft_tokens, num_blocks=24,
            block_size=2, settings={"enable_prefix_cache": False},
        )  # fmt: skip
        request_ids = [fakes.add([1, 1], max_tokens=11) for _ in range(4)]
        fakes.run()
        preemptions[num_draft_tokens] = fakes.engine.stats().preemptions
        assert all(fakes.tokens(r) == [1] * 11 for r in request_ids)
    assert preemptions == {0: 0, 6: 0}


def test_a_plan_indexes_a_limited_number_of_tokens(monkeypatch):
    """The sequences of a request share the index of its prompt."""
    num_indexed = []

    def counted(self, token_ids, stop, max_tokens):
        num_tokens = index(self, token_ids, stop, max_tokens)
        num_indexed.append((len(fakes.runner.plans), num_tokens))
        return num_tokens

    index = NgramIndex.index
    monkeypatch.setattr(NgramIndex, "index", counted)
    fakes = fake_engine(
        model=FakeModel(vocab_size=50), num_blocks=600, block_size=64, max_num_seqs=8,
        max_model_len=8000, settings={"max_num_batched_tokens": 4000},
    )  # fmt: skip
    prompt = [1 + i % 49 for i in range(6000)]
    sampling = SamplingParams(max_tokens=40, seed=1, n=4)
    request_ids = [fakes.add(prompt, sampling=sampling), fakes.add([9, *prompt], max_tokens=40)]
    fakes.run()
    for request_id in request_ids:
        indices = range(fakes.requests[request_id].sampling.n)
        assert all(fakes.tokens(request_id, i) == fakes.alone(request_id, i) for i in indices)
    assert any(drafts_of(fakes))
    by_plan = collections.Counter()
    for plan, num_tokens in num_indexed:
        by_plan[plan] += num_tokens
    assert max(by_plan.values()) == MAX_INDEXED_TOKENS
    assert sum(by_plan.values()) <= 2 * 6001 + 5 * 40


class Forcing(FakeRunner):
    """Returns after every token what follows, like a grammar; one time in four it is wrong."""

    def launch(self, plan):
        step = super().launch(plan)
        rows = tuple(self._forced(row) for row in step.wait().rows)
        return FakeStep(msgspec.structs.replace(step.wait(), rows=rows))

    def _forced(self, result: RowResult) -> RowResult:
        if not result.token_ids:
            return result
        row = self._rows[result.slot]
        states, token_ids = list(row.states), []
        for output_index in range(3):
            token_id = self.model.sample(
                states[-1], row.added.sampling, row.added.generation.seed, 0, output_index
            )
            token_ids.append(token_id)
            states += self.model.extend(states[-1], [token_id], row.adapters)
        if len(row.token_ids) % 4 == 0:
            token_ids[1] = (token_ids[1] + 1) % 1000
        return msgspec.structs.replace(result, forced_token_ids=tuple(token_ids))


def test_forced_tokens_are_draft_tokens_of_a_grammar(monkeypatch):
    from loraplex.core.grammar import Grammar, GrammarKind
    from support import fake_engine as module

    monkeypatch.setattr(module, "FakeRunner", Forcing)
    fakes = fake_engine(model=None, num_draft_tokens=0)
    grammar = Grammar(GrammarKind.LLGUIDANCE, "{}")
    sampling = SamplingParams(max_tokens=30, temperature=0.0, grammar=grammar, ignore_eos=True)
    request_id = fakes.add([1, 2, 3], sampling=sampling)
    fakes.run()
    assert fakes.tokens(request_id) == fakes.alone(request_id)
    stats = fakes.engine.stats()
    assert 0 < stats.accepted_tokens < stats.draft_tokens
    assert stats.steps < 16


def test_a_result_that_does_not_follow_its_drafts_fails_its_request(monkeypatch):
    fakes = fake_engine(model=FakeModel(vocab_size=2))
    request_id = fakes.add([1, 1], max_tokens=20)
    launch = fakes.runner.launch

    def wrong(plan):
        result = launch(plan).wait()
        rows = tuple(msgspec.structs.replace(r, token_ids=(0, *r.token_ids)) for r in result.rows)
        return FakeStep(StepResult(result.step_id, rows))

    monkeypatch.setattr(fakes.runner, "launch", wrong)
    fakes.run()
    assert fakes.completions[request_id].error_code == "row_failed"


def test_a_row_with_draft_tokens_computes_no_more_tokens_than_a_row_may():
    """The blocks that are reserved for a row with a window are counted by that."""
    for num_blocks in range(8, 16):
        fakes = fake_engine(
            model=FakeModel(vocab_size=2), num_draft_tokens=12, block_size=1,
            num_blocks=num_blocks, spec=Blocks(3),
            settings={
                "max_prefill_chunk": 3,
                "batch_scheduler_policy": BatchSchedulerPolicy.GUARANTEED_NO_EVICT,
            },
        )  # fmt: skip
        request_ids = [fakes.add([1], max_tokens=n) for n in (40, 35, 30, 25)]
        fakes.run()
        assert all(fakes.tokens(r) == fakes.alone(r) for r in request_ids)
        assert any(drafts_of(fakes))
        assert max(row.num_tokens for plan in fakes.runner.plans for row in plan.rows) == 3
