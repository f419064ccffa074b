"""Order, chunks, prefix hits, preemption, limits: seen through an engine on fake parts."""

import re

import pytest

from loraplex.core.errors import ConfigError
from loraplex.core.grammar import Grammar, GrammarKind
from loraplex.core.plan import Wanted
from loraplex.core.sampling_params import SamplingParams
from loraplex.core.scheduler_settings import SchedulerSettings
from support.capacities import changed_capacity
from support.fake_engine import MILLISECOND_NS, FakeEngine
from support.fake_model import FakeModel
from support.fake_runner import FAKE_CAPACITY, fake_logprob
from support.naming import naming


def fake_engine(settings=None, *, model=None, overlap=False, **capacity):
    capacity = {"block_size": 4, "num_blocks": 32, "max_num_seqs": 4, **capacity}
    fakes = changed_capacity(FAKE_CAPACITY, **capacity)
    return FakeEngine(fakes, SchedulerSettings(**(settings or {})), model=model, overlap=overlap)


def rows_of(fakes, step=-1):
    """(start, num_tokens) of each row of a launched plan."""
    return [(row.start, row.num_tokens) for row in fakes.runner.plans[step].rows]


def test_one_request_has_its_output_and_its_times():
    fakes = fake_engine()
    request_id = fakes.add([1, 2, 3, 4, 5], max_tokens=3)
    fakes.run()
    completion = fakes.completions[request_id]
    assert completion.token_ids == {0: fakes.alone(request_id)}
    assert completion.finish_reasons == {0: "length"}
    timing = completion.outputs[-1].timing
    arrival_ns = fakes.requests[request_id].arrival_ns
    assert timing.arrival_ns == timing.first_scheduled_ns == timing.first_token_ns == arrival_ns
    assert timing.last_token_ns == arrival_ns + 2 * MILLISECOND_NS
    assert timing.adapter_ready_ns == timing.num_preemptions == timing.num_cached_tokens == 0


def test_requests_of_one_batch_have_the_same_steps():
    fakes = fake_engine()
    fakes.add([9, 8], max_tokens=2)
    fakes.run()
    ids = [fakes.add([1, 2, 3], max_tokens=3), fakes.add([4, 5, 6], max_tokens=5)]
    fakes.run()
    timings = [fakes.completions[request_id].outputs[-1].timing for request_id in ids]
    assert [(timing.first_step, timing.last_step) for timing in timings] == [(3, 5), (3, 7)]


def test_a_decode_row_names_no_tokens():
    fakes = fake_engine()
    fakes.add([1, 2, 3], max_tokens=3)
    fakes.run()
    rows = [plan.rows[0] for plan in fakes.runner.plans]
    assert [row.token_ids for row in rows] == [(1, 2, 3), None, None]
    assert [row.start for row in rows] == [0, 3, 4]


@pytest.mark.parametrize("overlap", [False, True])
def test_a_deferred_row_computes_its_newest_token_again(overlap):
    """Its neighbour goes on meanwhile, and the outputs are those of both alone."""
    grammar = Grammar(GrammarKind.LLGUIDANCE, "{}")
    sampling = SamplingParams(max_tokens=4, grammar=grammar)
    fakes = fake_engine(overlap=overlap)
    first = fakes.add([1, 2, 3, 4, 5], sampling=sampling)
    fakes.runner.defer_rows(2)
    fakes.step(2)
    second = fakes.add([7, 8], max_tokens=4)
    fakes.run()
    fakes.runner.defer_rows(1)
    third = fakes.add([1, 2, 9], sampling=sampling)
    fakes.run()
    rows = [row for plan in fakes.runner.plans for row in plan.rows if row.slot == 0]
    assert [(row.start, row.num_tokens) for row in rows][:4] == [(0, 5), (4, 1), (4, 1), (5, 1)]
    assert rows[1].token_ids == (5,), "the runner has sampled nothing yet"
    for request_id in (first, second, third):
        assert fakes.completions[request_id].token_ids == {0: fakes.alone(request_id)}
    fakes.engine.check()


def test_prompts_are_chunked_beside_decode_rows():
    fakes = fake_engine({"max_num_batched_tokens": 6})
    fakes.add([1, 2], max_tokens=8)
    fakes.step()
    fakes.add(range(10, 25), max_tokens=2)
    fakes.step(4)
    assert rows_of(fakes, 1) == [(2, 1), (0, 5)]
    assert rows_of(fakes, 2) == [(3, 1), (5, 5)]
    assert rows_of(fakes, 3) == [(4, 1), (10, 5)]
    assert [plan.rows[1].wanted for plan in fakes.runner.plans[1:4]] == [
        Wanted.NONE,
        Wanted.NONE,
        Wanted.LAST,
    ]
    fakes.run()


def test_decode_rows_come_before_older_chunks():
    fakes = fake_engine({"max_num_batched_tokens": 5})
    fakes.add(range(1, 30), max_tokens=1)
    fakes.step()
    fakes.add([1], max_tokens=9, priority=1)
    fakes.step(5)
    assert rows_of(fakes, 4) == [(20, 5)]
    fakes.run()


def test_max_prefill_chunk():
    fakes = fake_engine({"max_prefill_chunk": 4})
    fakes.add(range(1, 10))
    fakes.add(range(20, 30))
    fakes.step()
    assert rows_of(fakes) == [(0, 4), (0, 4)]
    fakes.run()


def test_priority_before_arrival():
    fakes = fake_engine(max_num_seqs=1)
    late, urgent = fakes.add(priority=1), fakes.add(priority=0)
    fakes.step()
    assert fakes.records[0].request_ids == (urgent,)
    fakes.run()
    assert fakes.tokens(late) == fakes.alone(late)


def test_prefix_hits_leave_the_last_token_to_compute():
    fakes = fake_engine()
    first = fakes.add(range(1, 9), max_tokens=1)
    fakes.run()
    second = fakes.add(range(1, 9), max_tokens=1)
    fakes.step()
    assert rows_of(fakes) == [(4, 4)]
    fakes.run()
    assert fakes.completions[first].outputs[-1].timing.num_cached_tokens == 0
    assert fakes.completions[second].outputs[-1].timing.num_cached_tokens == 4
    stats = fakes.engine.stats()
    assert (stats.prompt_tokens, stats.cached_tokens) == (16, 4)


def test_blocks_are_published_after_their_step():
    fakes = fake_engine()
    fakes.add(range(1, 9), max_tokens=1)
    fakes.add(range(1, 9), max_tokens=1)
    fakes.step()
    assert rows_of(fakes) == [(0, 8), (0, 8)]
    fakes.run()


def test_a_failed_row_leaves_nothing_in_the_prefix_cache():
    fakes = fake_engine()
    fakes.runner.fail_rows()
    failed = fakes.add(range(1, 9), max_tokens=1)
    other = fakes.add(range(20, 24), max_tokens=1)
    fakes.run()
    assert fakes.completions[failed].error_code == "row_failed"
    assert fakes.tokens(other) == fakes.alone(other)
    again = fakes.add(range(1, 9), max_tokens=1)
    fakes.run()
    assert fakes.tokens(again) == fakes.alone(again)
    assert fakes.completions[again].outputs[-1].timing.num_cached_tokens == 0


def test_no_prefix_cache():
    fakes = fake_engine({"enable_prefix_cache": False})
    for _ in range(2):
        fakes.add(range(1, 9), max_tokens=1)
        fakes.run()
    assert rows_of(fakes) == [(0, 8)]
    assert fakes.engine.stats().blocks_cached == 0


def test_the_youngest_is_preempted_and_keeps_its_output():
    fakes = fake_engine(num_blocks=6, max_num_seqs=2)
    old = fakes.add([1, 2, 3, 4], max_tokens=16)
    young = fakes.add([5, 6, 7, 8], max_tokens=16)
    fakes.run()
    stats = fakes.engine.stats()
    assert stats.preemptions >= 1
    assert sum(record.num_preempted for record in fakes.records) == stats.preemptions
    assert fakes.completions[old].outputs[-1].timing.num_preemptions == 0
    assert fakes.completions[young].outputs[-1].timing.num_preemptions == stats.preemptions
    for request_id in (old, young):
        assert fakes.tokens(request_id) == fakes.alone(request_id)


def test_a_resumed_sequence_finds_its_blocks_in_the_prefix_cache():
    fakes = fake_engine(num_blocks=6, max_num_seqs=2)
    fakes.add([1, 2, 3, 4], max_tokens=12)
    young = fakes.add([5, 6, 7, 8], max_tokens=12)
    fakes.run()
    assert fakes.completions[young].outputs[-1].timing.num_preemptions
    resumed = [
        plan.rows[[row.slot for row in plan.rows].index(added.slot)]
        for plan in fakes.runner.plans
        for added in plan.added
        if added.num_prompt_tokens < len(added.token_ids)
    ]
    assert resumed[0].start > 0
    assert resumed[0].token_ids is not None


def test_one_that_found_too_few_blocks_is_admitted_as_soon_as_there_are_enough():
    fakes = fake_engine(num_blocks=10, max_num_seqs=3)
    long = fakes.add([1], max_tokens=20)
    short = fakes.add(range(1, 9), max_tokens=3)
    waits = fakes.add(range(20, 44), max_tokens=1)
    fakes.run()
    assert not any({short, waits} <= {*record.request_ids} for record in fakes.records)
    assert any({long, waits} <= {*record.request_ids} for record in fakes.records)


def test_what_can_never_fit_is_refused_with_numbers():
    fakes = fake_engine(num_blocks=4, max_model_len=50)
    fits = fakes.add(range(1, 9), max_tokens=9)
    too_long = fakes.add(range(1, 9), max_tokens=10)
    beyond_model = fakes.add(range(50), max_tokens=1)
    fakes.run()
    assert fakes.tokens(fits) == fakes.alone(fits)
    assert fakes.completions[too_long].error_code == "prompt_too_long"
    message = fakes.completions[too_long].outputs[-1].error.message
    assert re.search(naming(8, 10, 5, "KV", 4), message)
    assert re.search(naming(5, "KV", 4, 8, 10), message)
    assert re.search(naming(49, 50), fakes.completions[beyond_model].outputs[-1].error.message)


@pytest.mark.parametrize(("num_blocks", "code"), [(12, None), (11, "prompt_too_long")])
def test_the_longest_request_needs_a_block_for_all_its_tokens_but_the_last(num_blocks, code):
    # 49 tokens: the last one is never computed, and the other 48 fill 12 blocks.
    fakes = fake_engine(num_blocks=num_blocks, max_model_len=49)
    longest = fakes.add(range(40), max_tokens=9)
    shorter = fakes.add(range(36), max_tokens=9)
    fakes.run()
    assert fakes.completions[longest].error_code == code
    assert fakes.completions[shorter].error_code is None


def test_the_models_length_ends_a_sequence():
    fakes = fake_engine(max_model_len=8)
    request_id = fakes.add([1, 2, 3, 4, 5], sampling=SamplingParams(max_tokens=None, seed=1))
    fakes.run()
    assert len(fakes.tokens(request_id)) == 3
    assert fakes.completions[request_id].finish_reasons == {0: "length"}


def test_a_stop_token_is_the_last_token():
    fakes = fake_engine(model=FakeModel(1000, eos_token_id=0, eos_rate=1.0))
    request_id = fakes.add(max_tokens=5)
    fakes.run()
    delta = fakes.completions[request_id].outputs[-1].deltas[-1]
    assert (delta.token_ids, delta.finish_reason, delta.stop_token_id) == ((0,), "stop", 0)


def test_min_tokens_suppresses_the_end():
    fakes = fake_engine(model=FakeModel(1000, eos_token_id=0, eos_rate=1.0))
    request_id = fakes.add(sampling=SamplingParams(max_tokens=5, min_tokens=2, seed=1))
    fakes.run()
    tokens = fakes.tokens(request_id)
    assert len(tokens) == 3
    assert tokens[-1] == 0
    assert 0 not in tokens[:2]


def test_the_queue_is_bounded():
    fakes = fake_engine({"max_queue_size": 1}, max_num_seqs=1)
    accepted = [fakes.add(), fakes.add()]
    refused = fakes.add()
    fakes.run()
    assert fakes.completions[refused].error_code == "queue_full"
    assert fakes.completions[refused].outputs[-1].error.retry_after_seconds >= 1.0
    assert all(fakes.completions[request_id].error_code is None for request_id in accepted)
    assert fakes.completions[refused].outputs[-1].timing.arrival_ns > 0


@pytest.mark.parametrize("num_steps", [0, 1, 3])
def test_a_deadline_ends_a_request_in_any_state(num_steps):
    fakes = fake_engine(max_num_seqs=1)
    fakes.add(max_tokens=6)
    fakes.step(num_steps)
    running = fakes.add(max_tokens=100, priority=-1, timeout_ns=50 * MILLISECOND_NS)
    waiting = fakes.add(timeout_ns=5 * MILLISECOND_NS)
    fakes.run()
    for request_id in (running, waiting):
        assert fakes.completions[request_id].error_code == "deadline_exceeded"
    assert "its 0.05 seconds" in fakes.completions[running].outputs[-1].error.message
    assert fakes.tokens(running) == fakes.alone(running)[: len(fakes.tokens(running))]
    assert fakes.tokens(waiting) == []


def test_requests_are_held_back_to_meet_in_one_step():
    fakes = fake_engine({"max_queue_delay_microseconds": 5000})
    arrival_ns = fakes.clock.now_ns()
    fakes.add()
    fakes.step()
    assert fakes.records == []
    assert fakes.engine.next_wake_ns() == arrival_ns + 5 * MILLISECOND_NS
    fakes.add()
    fakes.clock.advance(fakes.engine.next_wake_ns() - fakes.clock.now_ns())
    fakes.step()
    assert fakes.records[0].num_rows == 2
    fakes.run()


def test_a_full_batch_is_not_held_back():
    fakes = fake_engine({"max_queue_delay_microseconds": 5000}, max_num_seqs=2)
    fakes.add()
    fakes.add()
    fakes.step()
    assert fakes.records[0].num_rows == 2
    fakes.add()
    fakes.step()
    assert fakes.records[1].num_rows == 2
    fakes.run()


def test_no_request_is_held_back_while_something_runs():
    fakes = fake_engine({"max_queue_delay_microseconds": 5000})
    fakes.add(max_tokens=20)
    fakes.step(6)
    fakes.add()
    fakes.step()
    assert fakes.records[-1].num_rows == 2
    fakes.run()


def test_a_deadline_wakes_a_request_that_is_held_back():
    fakes = fake_engine({"max_queue_delay_microseconds": 50000})
    request_id = fakes.add(timeout_ns=7 * MILLISECOND_NS)
    assert fakes.engine.next_wake_ns() == fakes.requests[request_id].deadline_ns
    fakes.run()
    assert fakes.completions[request_id].error_code == "deadline_exceeded"


def test_sequences_of_a_request_share_its_prompt():
    fakes = fake_engine()
    sampling = SamplingParams(max_tokens=3, n=3, seed=1)
    request_id = fakes.add(range(1, 10), sampling=sampling)
    fakes.step()
    assert rows_of(fakes) == [(0, 9)]
    fakes.step()
    assert rows_of(fakes) == [(9, 1), (8, 1), (8, 1)]
    fakes.run()
    completion = fakes.completions[request_id]
    assert completion.token_ids == {i: fakes.alone(request_id, i) for i in range(3)}
    assert len({tuple(tokens) for tokens in completion.token_ids.values()}) == 3
    assert sum(output.finished for output in completion.outputs) == 1


def test_sequences_without_a_shared_block_start_together():
    fakes = fake_engine()
    fakes.add([1, 2, 3], sampling=SamplingParams(max_tokens=3, n=3, seed=1))
    fakes.step()
    assert rows_of(fakes) == [(0, 3)] * 3
    fakes.run()


def test_one_sequence_is_aborted_and_the_others_go_on():
    fakes = fake_engine()
    request_id = fakes.add(range(1, 10), sampling=SamplingParams(max_tokens=3, n=3, seed=1))
    fakes.engine.abort(request_id, 0)
    fakes.engine.abort(request_id, 0)
    fakes.run()
    completion = fakes.completions[request_id]
    assert completion.finish_reasons == {0: "abort", 1: "length", 2: "length"}
    assert completion.token_ids[1] == fakes.alone(request_id, 1)
    assert completion.error_code is None


def test_an_abort_gives_everything_back_at_once():
    fakes = fake_engine()
    request_id = fakes.add(range(1, 10), sampling=SamplingParams(max_tokens=9, n=2, seed=1))
    fakes.step(3)
    assert fakes.engine.stats().blocks_held > 0
    fakes.engine.abort(request_id)
    stats = fakes.engine.stats()
    assert (stats.blocks_held, stats.num_running, stats.num_waiting) == (0, 0, 0)
    fakes.run()
    assert fakes.completions[request_id].finish_reasons == {0: "abort", 1: "abort"}
    assert fakes.completions[request_id].is_finished


def test_prompt_logprobs_over_chunks_and_once():
    fakes = fake_engine({"max_prefill_chunk": 3})
    prompt = tuple(range(1, 9))
    fakes.add(prompt, max_tokens=1)
    fakes.run()
    sampling = SamplingParams(max_tokens=2, n=2, seed=1, prompt_logprobs=0, logprobs=1)
    request_id = fakes.add(prompt, sampling=sampling)
    fakes.run()
    completion = fakes.completions[request_id]
    scores = [o.prompt_logprobs for o in completion.outputs if o.prompt_logprobs is not None]
    assert scores == [(None, *(fake_logprob(token_id) for token_id in prompt[1:]))]
    assert completion.outputs[0].deltas[0].token_ids != ()
    assert completion.outputs[0].deltas[0].logprobs == (
        fake_logprob(completion.token_ids[0][0], 1),
    )
    assert completion.token_ids[1] == fakes.alone(request_id, 1)


def test_prompt_logprobs_start_again_after_a_preemption():
    fakes = fake_engine({"max_prefill_chunk": 1}, num_blocks=6, max_num_seqs=2)
    fakes.add([1, 2, 3, 4], max_tokens=16)
    prompt = tuple(range(10, 24))
    scored = fakes.add(prompt, sampling=SamplingParams(max_tokens=1, prompt_logprobs=0))
    fakes.run()
    completion = fakes.completions[scored]
    assert completion.outputs[-1].timing.num_preemptions == 1
    expected = (None, *(fake_logprob(token_id) for token_id in prompt[1:]))
    assert [o.prompt_logprobs for o in completion.outputs] == [expected]


def test_prompt_logprobs_of_one_token():
    fakes = fake_engine()
    request_id = fakes.add([5], sampling=SamplingParams(max_tokens=1, prompt_logprobs=0))
    fakes.run()
    assert fakes.completions[request_id].outputs[0].prompt_logprobs == (None,)


def test_settings_must_suit_the_runner():
    with pytest.raises(ConfigError, match=r"max_num_batched_tokens \(3\).*max_num_seqs \(4\)"):
        fake_engine({"max_num_batched_tokens": 3})


def test_an_empty_engine_sleeps():
    fakes = fake_engine()
    assert fakes.engine.next_wake_ns() is None
    fakes.step()
    assert fakes.runner.plans == []
    assert fakes.engine.is_idle
