"""Requests that an engine goes on with where another one died, at every point."""

import dataclasses

import msgspec
import pytest

from loraplex.core.output import FinishReason
from loraplex.core.sampling_params import SamplingParams
from loraplex.core.scheduler_settings import SchedulerSettings
from loraplex.engine.step_marker import StepMarker
from support.fake_engine import Completion, FakeEngine

PROMPTS = {"short": range(1, 6), "long": range(1, 60)}
CHUNKED = SchedulerSettings(max_num_batched_tokens=24, max_prefill_chunk=16)
SAMPLINGS = {
    "greedy": SamplingParams(max_tokens=6, temperature=0, seed=1),
    "sampled": SamplingParams(max_tokens=6, seed=2, n=3, min_tokens=2),
    "scored": SamplingParams(max_tokens=4, seed=3, n=2, logprobs=1, prompt_logprobs=1),
}


def new_engine(overlap: bool) -> FakeEngine:
    fakes = FakeEngine(settings=CHUNKED, overlap=overlap)
    fakes.register("a")
    return fakes


def take_over(fakes: FakeEngine, dead: FakeEngine) -> None:
    """Return the rest of the requests of a dead engine, as serving sends it."""
    for request_id, request in dead.requests.items():
        completion = dead.completions[request_id]
        fakes.requests[request_id] = request
        fakes.completions[request_id] = Completion()
        if completion.is_finished:
            continue
        indices = range(request.sampling.num_sequences)
        again = msgspec.structs.replace(
            request,
            outputs=tuple(tuple(completion.token_ids.get(index, ())) for index in indices),
            ended=tuple(sorted(completion.finish_reasons)),
            prompt_scores_delivered=any(o.prompt_logprobs is not None for o in completion.outputs),
            num_restarts=1,
        )
        fakes.engine.add(again)


def whole(first: Completion, second: Completion) -> dict[int, list[int]]:
    indices = {*first.token_ids, *second.token_ids}
    return {i: first.token_ids.get(i, []) + second.token_ids.get(i, []) for i in indices}


def reasons(*completions: Completion) -> dict[int, FinishReason]:
    return {
        index: reason
        for completion in completions
        for index, reason in completion.finish_reasons.items()
    }


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("prompt", PROMPTS.values(), ids=PROMPTS)
def test_no_token_changes_wherever_an_engine_dies(prompt, sampling, overlap):
    calm = new_engine(overlap)
    ids = [calm.add(prompt, *digests, sampling=sampling) for digests in ((), ("a",))]
    calm.run()
    num_steps = len(calm.records)
    assert num_steps > 3
    for num_before in range(num_steps + 1):
        dead, fakes = new_engine(overlap), new_engine(overlap)
        for digests in ((), ("a",)):
            dead.add(prompt, *digests, sampling=sampling)
        dead.step(num_before)
        take_over(fakes, dead)
        fakes.run()
        for request_id in ids:
            before, after = dead.completions[request_id], fakes.completions[request_id]
            expected = calm.completions[request_id]
            assert whole(before, after) == expected.token_ids, num_before
            assert reasons(before, after) == expected.finish_reasons
            reported = [o.prompt_logprobs for o in (*before.outputs, *after.outputs)]
            expected_scores = [o.prompt_logprobs for o in expected.outputs if o.prompt_logprobs]
            assert [scores for scores in reported if scores is not None] == expected_scores


def test_no_queue_is_too_full_for_a_request_that_was_accepted_before():
    settings = SchedulerSettings(max_queue_size=1)
    dead, fakes = FakeEngine(), FakeEngine(settings=settings)
    for _ in range(fakes.engine.capacity.max_num_seqs + 3):
        dead.add(max_tokens=9)
    dead.step(2)
    take_over(fakes, dead)
    refused = fakes.add()
    fakes.run()
    assert fakes.completions[refused].error_code == "queue_full"
    assert all(fakes.completions[request_id].error_code is None for request_id in dead.requests)


def test_timing_counts_engines_and_is_sent_early():
    dead, fakes = new_engine(False), new_engine(False)
    request_id = dead.add(max_tokens=9)
    dead.step()
    first = dead.completions[request_id].outputs[0].timing
    assert first.first_token_ns > 0
    dead.step()
    assert dead.completions[request_id].outputs[1].timing is None
    take_over(fakes, dead)
    fakes.run()
    timing = fakes.completions[request_id].outputs[-1].timing
    assert (timing.num_restarts, timing.num_output_tokens) == (1, 9)


def test_waits_for_adapters_are_measured(monkeypatch):
    fakes = FakeEngine(num_polls=5, copy_steps=2)
    poll = fakes.loader.poll
    monkeypatch.setattr(
        fakes.loader,
        "poll",
        lambda: [dataclasses.replace(load, load_ns=10**9) for load in poll()],
    )
    fakes.register("a")
    cold, warm = fakes.add([1], "a"), fakes.add([2])
    fakes.step(4)
    joins = fakes.add([4], "a")
    fakes.run()
    late = fakes.add([3], "a")
    fakes.run()
    waits = {
        request_id: fakes.completions[request_id].outputs[-1].timing.adapter_load_ns
        for request_id in (cold, warm, joins, late)
    }

    assert 0 < waits[joins] < waits[cold] < 10**9, "no request waits before it comes"
    assert waits[warm] == waits[late] == 0


def test_steps_in_flight_are_marked(monkeypatch):
    fakes, marker, seen = FakeEngine(), StepMarker(), []
    fakes.engine.mark_steps(marker)
    launch = fakes.runner.launch

    def looking_launch(plan):
        seen.append(marker.request_ids())
        return launch(plan)

    monkeypatch.setattr(fakes.runner, "launch", looking_launch)
    fakes.add(max_tokens=2)
    fakes.add(max_tokens=3, sampling=SamplingParams(n=2, max_tokens=1, seed=0))
    fakes.step()
    assert marker.request_ids() == frozenset()
    fakes.runner.fail_step()
    fakes.step()
    assert marker.request_ids() == frozenset()
    assert seen == [{1, 2}, {1}]
