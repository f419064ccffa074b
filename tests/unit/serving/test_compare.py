import asyncio

import msgspec
import pytest

from loraplex.core.adapter import AdapterChoice, ByName
from loraplex.core.errors import AdapterNotFoundError, InvalidParameterError, StepFailedError
from loraplex.core.output import FinishReason, RequestTiming, TokenLogprob
from loraplex.core.principal import LOCAL
from loraplex.core.request import GenerateRequest
from loraplex.core.sampling_params import MAX_LOGPROBS, SamplingParams
from loraplex.core.task import Generate
from loraplex.serving.compare import (
    ComparedOutput,
    Difference,
    FirstDifference,
    begun_comparison,
    compare,
    comparison_requests,
    difference,
)
from loraplex.serving.continuation import Admitted, Continuation, continuing
from support.echo_service import EchoService

FR, NO = (AdapterChoice(ByName("fr"), 0.5),), (AdapterChoice(ByName("no")),)


def token(token_id: int, logprob: float, *top: tuple[int, float]) -> TokenLogprob:
    return TokenLogprob(token_id, logprob, 1, top)


def completion(*tokens: TokenLogprob, timing: RequestTiming | None = None) -> ComparedOutput:
    return ComparedOutput(
        adapters=(),
        prompt_token_ids=(1,),
        text="",
        token_ids=tuple(t.token_id for t in tokens),
        logprobs=tokens,
        finish_reason=FinishReason.LENGTH,
        timing=timing or RequestTiming(0),
    )


def test_the_first_difference():
    base = (token(5, -1.0), token(6, -0.5, (6, -0.5), (9, -2.0)), token(7, -3.0))
    mine = (token(5, -0.25), token(8, -1.5, (8, -1.5), (6, -1.75)), token(7, -9.0))
    first = FirstDifference(1, 8, 6, -1.5, None, -1.75, -0.5)
    assert difference(mine, base) == Difference(1, 0.75, first)
    assert difference(base, mine) == Difference(
        1, -0.75, FirstDifference(1, 6, 8, -0.5, -1.75, None, -1.5)
    )


def test_no_token_in_common():
    found = difference([token(1, -1.0)], [token(2, -2.0)])
    assert (found.num_same_tokens, found.mean_logprob_difference) == (0, None)
    assert found.first is not None
    assert found.first.position == 0


def test_equal_as_far_as_both_go():
    long, short = [token(1, -1.0), token(2, -1.0)], [token(1, -2.0)]
    assert difference(short, long) == Difference(1, -1.0, None)
    assert difference(long, short) == Difference(1, 1.0, None)


def test_times():
    timing = RequestTiming(1_000_000, first_token_ns=3_500_000, last_token_ns=9_000_000)
    found = completion(token(1, -1.0), token(2, -0.5), timing=timing)
    assert (found.ttft_ms, found.total_ms, found.logprob) == (2.5, 8.0, -1.5)


def comparison_of(choices, prompts=(), **sampling):
    """One request for each choice, with the prompt `hi` where no other is given."""
    task = Generate(SamplingParams(**sampling))
    return [
        GenerateRequest(request_id=0, model="echo", prompt=prompt, task=task, adapters=adapters)
        for adapters, prompt in zip(choices, prompts or ["hi"] * len(choices), strict=True)
    ]


def run(backend, choices, prompts=(), **sampling):
    requests = comparison_requests(backend, comparison_of(choices, prompts, **sampling))
    return requests, asyncio.run(compare(backend, requests, LOCAL))


async def progress_of(backend, requests):
    async with begun_comparison(backend, requests, LOCAL) as comparison:
        return [each async for each in comparison.progress()]


@pytest.fixture
def backend():
    backend = EchoService()
    backend.register("fr")
    return backend


def test_a_failing_adapter_leaves_the_others_alone(backend):
    _, [fr, no, base] = run(backend, [FR, NO, ()], max_tokens=64)
    assert isinstance(no, AdapterNotFoundError)
    assert (fr.text, base.text) == ("echo+fr: hi", "echo: hi")
    assert [(a.name, a.scale) for a in fr.adapters] == [("fr", 0.5)]
    assert base.versus_base is None
    assert fr.versus_base.num_same_tokens == len("echo")
    assert fr.versus_base.first.token_id == ord("+")
    assert fr.versus_base.first.base_token_id == ord(":")
    assert backend.aborted == []


def test_an_error_in_the_middle(backend):
    backend.plant(StepFailedError("no"), after_outputs=2)
    _, [first, second] = run(backend, [FR, ()])
    assert isinstance(first, StepFailedError)
    assert second.text.startswith("echo: hi"[:16])


def test_without_a_base_there_is_no_difference(backend):
    _, [fr] = run(backend, [FR])
    assert fr.versus_base is None
    _, [failed, fr] = run(backend, [NO, FR])
    assert isinstance(failed, AdapterNotFoundError)
    assert fr.versus_base is None


def test_all_draw_alike(backend):
    requests, _ = run(backend, [(), FR, FR], temperature=1.0)
    assert len({request.sampling.seed for request in requests}) == 1
    assert len({request.request_id for request in requests}) == 3
    assert all(request.sampling.logprobs == MAX_LOGPROBS for request in requests)
    requests, _ = run(backend, [(), FR], seed=5, n=3)
    assert [(r.sampling.seed, r.sampling.n) for r in requests] == [(5, 1), (5, 1)]


def test_a_seed_of_its_own(backend):
    own, other, third = comparison_of([(), FR, FR], temperature=1.0)
    own = own.with_sampling(msgspec.structs.replace(own.sampling, seed=9))
    seeds = [each.sampling.seed for each in comparison_requests(backend, [own, other, third])]
    assert seeds[0] == 9
    assert seeds[1] == seeds[2] is not None


def test_an_output_is_compared_with_the_base_of_its_own_prompt(backend):
    prompts = ["hi", "hi", "ho", "ho", "he"]
    _, found = run(backend, [(), FR, FR, (), FR], prompts, max_tokens=64)
    assert [each.text for each in found] == [
        "echo: hi",
        "echo+fr: hi",
        "echo+fr: ho",
        "echo: ho",
        "echo+fr: he",
    ]
    same = len("echo")
    assert found[1].versus_base.num_same_tokens == found[2].versus_base.num_same_tokens == same
    assert [found[i].versus_base for i in (0, 3, 4)] == [None, None, None]


async def test_one_that_is_cancelled_ends_with_what_it_has(backend):
    """Its row is free, and the others go on."""
    backend.delay_seconds = 0.01
    requests = comparison_requests(
        backend, comparison_of([(), FR, NO], max_tokens=4000, ignore_eos=True)
    )
    ends, num_running = {}, []
    async with begun_comparison(backend, requests, LOCAL) as comparison:
        assert not comparison.cancel(2), "it was refused"
        async for index, item in comparison.progress():
            if index == 1 and not isinstance(item, ComparedOutput):
                num_running.append(backend.engine_stats.num_running)
                assert comparison.cancel(1)
            if isinstance(item, ComparedOutput):
                ends[index] = item
                assert not comparison.cancel(index), "it has ended"
                if index == 1:
                    num_running.append(backend.engine_stats.num_running)
                    assert comparison.cancel(0)
    assert [ends[index].finish_reason for index in (1, 0)] == [FinishReason.ABORT] * 2
    assert (num_running[0], num_running[-1]) == (2, 1)
    assert 0 < len(ends[1].token_ids) < 4000
    assert "echo+fr".startswith(ends[1].text[:7])
    assert backend.aborted == [requests[1].request_id, requests[0].request_id]
    value = backend.metrics.registry.get_sample_value
    for index, adapter in enumerate(("", "fr")):
        labels = {"model": "echo", "adapter": adapter}
        ended = value("loraplex_requests_total", labels | {"finish_reason": "abort"})
        tokens = value("loraplex_generation_tokens_total", labels)
        assert (ended, tokens) == (1, len(ends[index].token_ids)), "each is counted once"


def test_bad_sampling_yields_no_completion(backend):
    with pytest.raises(InvalidParameterError, match="temperature"):
        run(backend, [(), FR], temperature=-1.0)


def test_the_requests_are_one_batch_which_is_closed_when_all_are_admitted(backend):
    run(backend, [(), FR, NO])
    first, *others = (request.batch for request in backend.requests)
    assert not first.is_open
    assert len(others) == 2
    assert all(batch is first for batch in others)


def test_a_client_that_leaves_aborts_all(backend):
    backend.delay_seconds = 0.01

    async def leave():
        requests = comparison_requests(backend, comparison_of([(), FR]))
        task = asyncio.create_task(compare(backend, requests, LOCAL))
        await asyncio.sleep(0.03)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return [request.request_id for request in requests]

    assert asyncio.run(leave()) == sorted(backend.aborted)


class Silent:
    """A backend whose streams wait for ever, and note that they were closed."""

    def __init__(self) -> None:
        self.closed: list[int] = []

    async def generate(self, request, principal):
        return SilentStream(self, request.request_id)


class SilentStream:
    def __init__(self, backend: Silent, request_id: int) -> None:
        self._backend = backend
        self._request_id = request_id

    def __aiter__(self):
        return self

    async def __anext__(self):
        await asyncio.sleep(60)

    async def aclose(self):
        self._backend.closed.append(self._request_id)


def test_every_stream_is_closed():
    backend = Silent()

    async def leave():
        requests = [GenerateRequest(request_id=i, model="echo", prompt="hi") for i in range(3)]
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(compare(backend, requests, LOCAL), 0.05)

    asyncio.run(leave())
    assert sorted(backend.closed) == [0, 1, 2]


def test_an_output_that_differs_from_the_base_does_not_wait_for_it(backend):
    async def order():
        backend.scripts.extend([["a" * 40], ["b"], ["aa"]])
        requests = comparison_requests(backend, comparison_of([(), FR, FR]))
        progress = await progress_of(backend, requests)
        ends = [(index, item) for index, item in progress if isinstance(item, ComparedOutput)]
        return [(index, item.versus_base) for index, item in ends]

    *others, last = asyncio.run(order())
    assert last == (0, None)
    # One step ends both of the others. Which one is first depends on their tasks.
    assert sorted(each.num_same_tokens for _, each in others) == [0, 2]


def test_an_output_that_equals_the_base_so_far_waits_for_its_end(backend):
    async def order():
        requests = comparison_requests(backend, comparison_of([(), FR]))
        async for _ in await backend.generate(requests[1], LOCAL):
            pass  # the adapter is on the device from now on
        backend.scripts.extend([["aaaa"], ["aaaa"]])
        shorter = msgspec.structs.replace(requests[1].sampling, max_tokens=2)
        requests[1] = requests[1].with_sampling(shorter)
        progress = await progress_of(backend, requests)
        return [(i, isinstance(item, ComparedOutput)) for i, item in progress]

    assert asyncio.run(order())[-3:] == [(0, False), (1, True), (0, True)]


def test_a_continued_response_keeps_its_seed(backend):
    former = [Admitted(b"", 5, 0)]
    with continuing(Continuation(lambda _: None, former)):
        requests, _ = run(backend, [()], temperature=1.0)
    assert requests[0].sampling.seed == 5
