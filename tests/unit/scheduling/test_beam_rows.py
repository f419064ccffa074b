"""Beam search through an engine on fake parts: forks, preemption, limits, ends."""

import pytest

from loraplex.core.beam_search import BeamSearch, EarlyStopping
from loraplex.core.cache import Blocks
from loraplex.core.output import BeamLogprobs
from loraplex.core.sampling_params import SamplingParams
from loraplex.core.scheduler_settings import BatchSchedulerPolicy, SchedulerSettings
from support.capacities import changed_capacity
from support.fake_engine import FakeEngine
from support.fake_model import FakeModel
from support.fake_runner import FAKE_CAPACITY
from support.fake_search import search_alone

VOCAB_SIZE = 30


def fake_engine(settings=None, *, overlap=False, **capacity):
    capacity = {"block_size": 4, "num_blocks": 64, "max_num_seqs": 8, **capacity}
    fakes = changed_capacity(FAKE_CAPACITY, vocab_size=VOCAB_SIZE, **capacity)
    settings = SchedulerSettings(**(settings or {}))
    return FakeEngine(fakes, settings, model=FakeModel(VOCAB_SIZE), overlap=overlap)


def beam_sampling(width=3, *, n=1, max_tokens=12, **values):
    beam = {k: values.pop(k) for k in ("length_penalty", "early_stopping") if k in values}
    return SamplingParams(
        max_tokens=max_tokens, n=n, temperature=0.0, beam=BeamSearch(width=width, **beam), **values
    )


def deltas(fakes, request_id):
    return [d for output in fakes.completions[request_id].outputs for d in output.deltas]


def check_output(fakes, request_id):
    capacity = fakes.runner.capacity()
    request = fakes.requests[request_id]
    expected = search_alone(fakes.runner.model, request, capacity.max_model_len)
    found = deltas(fakes, request_id)
    assert [d.index for d in found] == list(range(len(expected)))
    for delta, (beam, _, stop) in zip(found, expected, strict=True):
        assert delta.token_ids == beam.token_ids
        assert delta.cumulative_logprob == beam.logprob
        assert (delta.finish_reason, delta.stop_token_id) == stop
    outputs = fakes.completions[request_id].outputs
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    return expected


@pytest.mark.parametrize("block_size", [1, 3, 4, 16])
@pytest.mark.parametrize("width", [1, 2, 3, 5])
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_the_output_is_that_of_the_search_alone(block_size, width, prefix_cache):
    fakes = fake_engine(
        {"enable_prefix_cache": prefix_cache}, block_size=block_size, num_blocks=256
    )
    fakes.register("a")
    for adapters in ((), ("a",)):
        for prompt in ([5], [1, 2, 3], [4, 5, 6, 7], range(1, 18)):
            sampling = beam_sampling(width, n=width)
            request_id = fakes.add(prompt, *adapters, sampling=sampling)
            fakes.run()
            check_output(fakes, request_id)
    copies = [copy for plan in fakes.runner.plans for copy in plan.block_copies]
    assert bool(copies) == (width > 1 and block_size > 1)
    assert fakes.engine.stats().preemptions == 0


def test_the_searches_of_these_tests_fork_and_end_at_different_lengths():
    """Or the tests would prove little."""
    fakes = fake_engine(num_blocks=256)
    lengths, num_joined, num_steps = set(), 0, 0
    for prompt in range(1, 9):
        request_id = fakes.add([prompt, 2, 3], sampling=beam_sampling(4, n=4), eos_token_ids=(0, 7))
        fakes.run()
        lengths |= {len(d.token_ids) for d in deltas(fakes, request_id)}
    for plan in fakes.runner.plans:
        if plan.rows and plan.rows[0].start > 2:
            num_steps += len(plan.rows)
            num_joined += len(plan.added)
    assert len(lengths) > 3
    assert 0.1 < num_joined / num_steps < 0.9


@pytest.mark.parametrize("early_stopping", list(EarlyStopping))
@pytest.mark.parametrize("length_penalty", [-1.0, 0.0, 2.0])
def test_ends(early_stopping, length_penalty):
    fakes = fake_engine(num_blocks=256)
    reasons = set()
    for prompt in ([1], [2], [3, 4, 5, 6, 7]):
        sampling = beam_sampling(
            3, n=2, max_tokens=20, early_stopping=early_stopping, length_penalty=length_penalty,
            min_tokens=2, stop_token_ids=(3, 4), stop_token_sequences=((5, 6),), logprobs=2,
        )  # fmt: skip
        request_id = fakes.add(prompt, sampling=sampling)
        fakes.run()
        for delta, (beam, _, stop) in zip(
            deltas(fakes, request_id), check_output(fakes, request_id), strict=True
        ):
            assert isinstance(delta.logprobs, BeamLogprobs), "an event loop would decode all"
            assert delta.logprobs == beam.scores
            assert [s.token_id for s in delta.logprobs] == list(delta.token_ids)
            assert sum(s.logprob for s in delta.logprobs) == pytest.approx(beam.logprob)
            assert all(len(s.top) == 2 for s in delta.logprobs)
            reasons.add(stop.reason)
            assert len(delta.token_ids) > 2
    if length_penalty < 1:  # else the longest outputs are the best
        assert "stop" in reasons


def test_all_beams_compute_in_the_same_steps():
    fakes = fake_engine({"max_prefill_chunk": 4})
    fakes.add(range(1, 11), sampling=beam_sampling(3))
    fakes.run()
    sizes = [[row.num_tokens for row in plan.rows] for plan in fakes.runner.plans if plan.rows]
    assert sizes[:3] == [[4], [4], [2]]
    assert sizes[3:] == [[1, 1, 1]] * len(sizes[3:])
    assert all(row.num_candidates == 6 for row in fakes.runner.plans[-1].rows)
    assert len(sizes) > 5


@pytest.mark.parametrize("policy", list(BatchSchedulerPolicy))
@pytest.mark.parametrize("overlap", [False, True])
def test_beams_beside_others_in_a_small_pool(policy, overlap):
    """Beams are preempted together, continue where they were, and no output changes."""
    preempted = 0
    for seed in range(12):
        fakes = fake_engine(
            {
                "enable_prefix_cache": seed % 3 > 0,
                "max_num_batched_tokens": 8 + seed,
                "batch_scheduler_policy": policy,
            },
            num_blocks=20, block_size=2 + seed % 3, overlap=overlap,
        )  # fmt: skip
        beams, others = [], []
        for i in range(5):
            prompt = [1 + (seed + i) % 3, *range(2, 2 + (5 * i + seed) % 9)]
            beams.append(
                fakes.add(
                    prompt, sampling=beam_sampling(2 + i % 2, n=2, max_tokens=7), priority=i % 2
                )
            )
            others.append(fakes.add(prompt, max_tokens=9, priority=(i + seed) % 2))
            fakes.step()
        fakes.run()
        for request_id in beams:
            if fakes.completions[request_id].error_code is None:
                check_output(fakes, request_id)
        for request_id in others:
            assert fakes.tokens(request_id) == fakes.alone(request_id)
        assert all(fakes.completions[r].error_code in (None, "prompt_too_long") for r in beams)
        preempted += sum(fakes.completions[r].outputs[-1].timing.num_preemptions for r in beams)
    evicts = policy is BatchSchedulerPolicy.MAX_UTILIZATION
    assert preempted > 10 if evicts else preempted == 0


def test_preempted_beams_share_again_what_they_have_in_common():
    """The pool has blocks for one prompt and the beams' own ends, not for three prompts."""
    num_preemptions = 0
    for seed in range(6):
        fakes = fake_engine({"enable_prefix_cache": False}, num_blocks=27, block_size=2)
        urgent = [fakes.add([i, 2], max_tokens=20, priority=0) for i in (1, 3)]
        sampling = beam_sampling(3, n=3, max_tokens=15)
        search = fakes.add([seed, *range(1, 12)], sampling=sampling, priority=1)
        fakes.run()
        num_preemptions += fakes.completions[search].outputs[-1].timing.num_preemptions
        check_output(fakes, search)
        assert all(fakes.tokens(request_id) == fakes.alone(request_id) for request_id in urgent)
    assert num_preemptions > 0


@pytest.mark.parametrize("num_steps", [0, 1, 2, 3, 6])
@pytest.mark.parametrize("index", [None, 0, 1])
def test_abort_ends_the_whole_search(num_steps, index):
    fakes = fake_engine({"max_prefill_chunk": 4})
    request_id = fakes.add(range(1, 7), sampling=beam_sampling(3, n=2))
    other = fakes.add([1, 2], max_tokens=3)
    fakes.step(num_steps)
    fakes.engine.abort(request_id, index)
    fakes.engine.check()
    fakes.run()
    completion = fakes.completions[request_id]
    assert completion.finish_reasons == {0: "abort", 1: "abort"}
    assert completion.error_code is None
    assert fakes.tokens(other) == fakes.alone(other)


@pytest.mark.parametrize("num_steps", [1, 2, 3, 5])
def test_a_failed_row_ends_the_whole_search(num_steps):
    fakes = fake_engine({"max_prefill_chunk": 4})
    request_id = fakes.add(range(1, 7), sampling=beam_sampling(3, n=2))
    fakes.step(num_steps)
    fakes.runner.fail_rows()
    fakes.run()
    assert fakes.completions[request_id].error_code == "row_failed"
    assert fakes.engine.stats().num_running == 0


def test_a_deadline_ends_the_whole_search():
    fakes = fake_engine()
    request_id = fakes.add([1, 2], sampling=beam_sampling(3, max_tokens=50), timeout_ns=5_000_000)
    fakes.run()
    assert fakes.completions[request_id].error_code == "deadline_exceeded"


def test_a_search_waits_for_all_its_slots():
    fakes = fake_engine(max_num_seqs=4)
    first = [fakes.add([i], max_tokens=6) for i in (1, 2)]
    search = fakes.add([3], sampling=beam_sampling(3, max_tokens=4))
    last = fakes.add([4], max_tokens=2)
    fakes.step()
    assert len(fakes.records[0].request_ids) == 2, "who comes after it does not take its slots"
    fakes.run()
    check_output(fakes, search)
    assert all(fakes.tokens(r) == fakes.alone(r) for r in (*first, last))


def test_what_can_never_be_computed_is_refused():
    fakes = fake_engine(max_num_seqs=4, num_blocks=12)
    wide = fakes.add([1], sampling=beam_sampling(5))
    large = fakes.add(range(1, 9), sampling=beam_sampling(4, max_tokens=13))
    fits = fakes.add(range(1, 9), sampling=beam_sampling(4, max_tokens=9))
    fakes.run()
    assert fakes.completions[wide].error_code == "invalid_parameter"
    assert "max_num_seqs" in fakes.completions[wide].outputs[-1].error.message
    assert fakes.completions[large].error_code == "prompt_too_long"
    check_output(fakes, fits)


def test_prompt_log_probabilities_of_a_search():
    fakes = fake_engine({"max_prefill_chunk": 3})
    request_id = fakes.add(range(1, 9), sampling=beam_sampling(3, prompt_logprobs=0))
    fakes.run()
    check_output(fakes, request_id)
    found = [o.prompt_logprobs for o in fakes.completions[request_id].outputs if o.prompt_logprobs]
    assert [len(scores) for scores in found] == [8]


def test_fewer_hypotheses_than_are_requested():
    fakes = FakeEngine(changed_capacity(FAKE_CAPACITY, vocab_size=3), model=FakeModel(vocab_size=3))
    request_id = fakes.add([1], sampling=beam_sampling(4, n=4, max_tokens=1))
    fakes.run()
    completion = fakes.completions[request_id]
    assert completion.error_code == "invalid_parameter"
    assert "only 3 outputs" in completion.outputs[-1].error.message


@pytest.mark.parametrize("attention_window", [None, 2, 3])
@pytest.mark.parametrize("block_size", [1, 2])
@pytest.mark.parametrize("num_steps", [5, 8, 12])
def test_a_search_whose_kv_is_all_in_the_prefix_cache_goes_on(
    attention_window, block_size, num_steps
):
    """Requeue a search, which happens after a step that is void."""
    for prompt in ([1, 5], [2, 5], [3, 5]):
        for width in (2, 4):
            fakes = fake_engine(
                block_size=block_size, num_blocks=256, spec=Blocks(attention_window)
            )
            sampling = beam_sampling(width, max_tokens=20)
            search = fakes.add(prompt, sampling=sampling, eos_token_ids=())
            fakes.step(num_steps)
            state = fakes.engine._scheduler._state
            state.requeue(next(iter(state.running)))
            fakes.run()
            check_output(fakes, search)
