import asyncio
import json

import pytest
from starlette.responses import JSONResponse, PlainTextResponse

from loraplex.bench.arrivals import Burst, ClosedLoop, Poisson
from loraplex.bench.client import Target, discover, run
from loraplex.bench.popularity import BaseOnly
from loraplex.bench.workload import Lengths, generate
from loraplex.core.errors import AdapterLoadError, ConfigError, QueueFullError
from support.naming import naming
from support.served import served


async def run_workload(url: str, workload, repeat: int = 0):
    target = await discover(url)
    requests = generate(workload, repeat, target.vocabulary)
    start_ns, records = await run(target, requests, workload.arrivals)
    return requests, start_ns, records


def most_at_once(records) -> int:
    """How many requests overlapped."""
    changes = sorted(change for r in records for change in ((r.start_ns, 1), (r.end_ns, -1)))
    now, most = 0, 0
    for _, change in changes:
        now += change
        most = max(most, now)
    return most


async def test_discovers_the_base_its_adapters_and_its_tokens(url):
    target = await discover(url)
    assert (target.base, target.adapters) == ("echo", ("a0", "a1", "a2"))
    assert target.max_model_len == 4096
    assert ord("q") in target.vocabulary
    assert list(target.vocabulary) == sorted(set(target.vocabulary))


async def test_what_is_sent_is_the_workload(url, backend, workload):
    requests, _, _ = await run_workload(url, workload(arrivals=ClosedLoop(1)))
    assert [request.prompt for request in backend.requests] == [
        request.prompt_token_ids for request in requests
    ]
    names = [choice.key.name for request in backend.requests for choice in request.adapters]
    assert names == ["a0", "a1", "a2", "a0", "a1", "a2"]
    for request in backend.requests:
        assert request.sampling.ignore_eos
        assert request.sampling.temperature == 0
        assert request.sampling.max_tokens == 5


async def test_without_adapters_the_base_model_is_used(url, backend, workload):
    await run_workload(url, workload(popularity=BaseOnly()))
    assert {(request.model, request.adapters) for request in backend.requests} == {("echo", ())}


async def test_a_record_has_lengths_and_times_in_order(url, backend, workload):
    backend.num_cached_tokens = 2
    lengths = {"prompt_tokens": Lengths(3, 9), "output_tokens": Lengths(2, 30)}
    requests, start_ns, records = await run_workload(url, workload(**lengths))
    for request, record in zip(requests, records, strict=True):
        assert record.error is None
        assert record.num_prompt_tokens == len(request.prompt_token_ids)
        assert record.num_output_tokens == request.num_output_tokens
        assert record.num_cached_tokens == 2
        # The echo server sends one token in a chunk, and the usage in a chunk that is none.
        assert len(record.chunk_ns) == request.num_output_tokens
        times = [start_ns, record.start_ns, *record.chunk_ns, record.end_ns]
        assert times == sorted(times)


@pytest.mark.parametrize("concurrency", [1, 3])
async def test_a_closed_loop_keeps_its_concurrency(url, backend, workload, concurrency):
    backend.delay_seconds = 0.002
    _, _, records = await run_workload(
        url, workload(num_requests=12, arrivals=ClosedLoop(concurrency))
    )
    assert most_at_once(records) == concurrency


async def test_a_burst_sends_all_at_once(url, backend, workload):
    backend.delay_seconds = 0.002
    _, start_ns, records = await run_workload(url, workload(num_requests=12, arrivals=Burst()))
    assert most_at_once(records) == 12
    assert {record.start_ns for record in records} == {start_ns}


async def test_poisson_sends_when_it_is_due(url, workload):
    requests, start_ns, records = await run_workload(url, workload(arrivals=Poisson(100.0)))
    for request, record in zip(requests, records, strict=True):
        assert record.start_ns - start_ns == int(request.due_seconds * 1e9)
        assert record.chunk_ns[0] >= record.start_ns


async def test_a_refused_request_is_a_record_and_the_others_go_on(url, backend, workload):
    backend.plant(QueueFullError("the queue is full"))
    _, _, records = await run_workload(url, workload(arrivals=ClosedLoop(1)))
    assert "status 429" in records[0].error
    assert "the queue is full" in records[0].error
    assert [record.error for record in records[1:]] == [None] * 5


async def test_a_broken_stream_is_a_failure(url, backend, workload):
    backend.plant(AdapterLoadError("the disk is gone"), after_outputs=2)
    _, _, records = await run_workload(url, workload(arrivals=ClosedLoop(1)))
    assert "the stream broke" in records[0].error
    assert "the disk is gone" in records[0].error


def streaming_server(*lines: str):
    """Return an ASGI app that responds to everything with these lines."""
    return PlainTextResponse("".join(f"{line}\n\n" for line in lines))


def usage(prompt_tokens: int, completion_tokens: int) -> str:
    tokens = {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}
    return f"data: {json.dumps({'choices': [], 'usage': tokens})}"


@pytest.mark.parametrize(
    ("lines", "error"),
    [
        (['data: {"choices": [{}]}', usage(4, 5), "data: [DONE]"], None),
        ([": a comment", 'data:{"choices":[{}]}', usage(4, 5)], None),
        (['data: {"choices": [{}]}', usage(4, 3), "data: [DONE]"], "requested 4 + 5 tokens"),
        (['data: {"choices": [{}]}', "data: [DONE]"], "the completion has 0 + 0"),
        (["data: {nonsense"], "is not a chunk"),
    ],
)
async def test_other_servers_are_read_with_care(workload, lines, error):
    target_fields = {"base": "m", "adapters": (), "max_model_len": None, "vocabulary": (1, 2)}
    requests = generate(workload(popularity=BaseOnly(), num_requests=1), 0, (1, 2))
    with served(streaming_server(*lines)) as url:
        _, [record] = await run(Target(url=url, **target_fields), requests, Burst())
    if error is None:
        assert record.error is None
        assert (record.num_output_tokens, len(record.chunk_ns)) == (5, 1)
    else:
        assert error in record.error


async def test_a_server_that_goes_away_is_a_failure(workload):
    with served(streaming_server()) as url:
        pass
    target = Target(url=url, base="m", adapters=(), max_model_len=None, vocabulary=(1,))
    requests = generate(workload(popularity=BaseOnly(), num_requests=1), 0, (1,))
    _, [record] = await run(target, requests, Burst())
    assert "Cannot connect to host" in record.error


@pytest.mark.parametrize(
    ("app", "named"),
    [
        (JSONResponse({"data": []}), ("/v1/models",)),
        (JSONResponse({"detail": "who are you"}, status_code=401), (401,)),
        (PlainTextResponse("hello"), ("JSON",)),
    ],
)
def test_what_is_no_such_server_is_said(app, named):
    with served(app) as url, pytest.raises(ConfigError, match=naming(*named)):
        asyncio.run(discover(url))


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "nonsense", "http://:x"])
def test_an_address_without_a_server_is_named(url):
    with pytest.raises(ConfigError, match=naming(url)):
        asyncio.run(discover(url))
