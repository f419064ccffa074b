import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from loraplex.bench.completions import (
    Exchange,
    StreamingClient,
    completion_body,
    lines,
    read_completion,
)
from loraplex.bench.workload import PlannedRequest
from loraplex.core.environment import KEY_HINT
from loraplex.core.errors import ConfigError
from support.naming import naming

REQUEST = PlannedRequest((1, 2, 3, 4), 5, None, 0.0)


def test_a_line_has_the_time_when_its_end_came():
    exchange = Exchange(REQUEST, chunks=[(1, b"a\n\nb"), (2, b"c"), (3, b"\r\nd\n"), (4, b"e")])
    assert [*lines(exchange)] == [(1, b"a"), (3, b"bc"), (3, b"d"), (4, b"e")]
    assert [*lines(Exchange(REQUEST))] == []


def test_a_comment_is_no_line():
    exchange = Exchange(REQUEST, chunks=[(1, b": ping\n\ndata: a\n"), (2, b":"), (3, b"\n:")])
    assert [*lines(exchange)] == [(1, b"data: a")]


async def test_a_response_over_the_wire(url):
    client = StreamingClient(url)
    exchange = Exchange(REQUEST)
    await client.stream("/v1/completions", completion_body("echo", REQUEST), exchange)
    response = read_completion(exchange)
    assert (response.num_prompt_tokens, response.num_output_tokens, response.error) == (4, 5, None)
    assert 1 <= len(response.chunk_ns) <= 5
    assert response.text
    assert [*response.chunk_ns] == sorted(response.chunk_ns)
    assert not await client.is_up("/nowhere")
    with pytest.raises(ConfigError, match="GET /nowhere: status 404"):
        await client.call("GET", "/nowhere")
    await client.close()


async def test_a_refusal_is_the_exchanges_error(url):
    client = StreamingClient(url)
    exchange = Exchange(REQUEST)
    await client.stream("/v1/completions", b'{"model": "no such"}', exchange)
    assert "status 4" in read_completion(exchange).error
    await client.close()


@pytest.mark.parametrize(
    ("status", "body", "expected"),
    [
        (403, '{"error": {"message": "no", "code": "c"}}', "GET /: status 403: no"),
        (401, '{"error": {"message": "no"}}', f"GET /: status 401: no; {KEY_HINT}"),
        (400, '{"error": "other"}', 'GET /: status 400: {"error": "other"}'),
        (502, "<html>bad</html>", "GET /: status 502: <html>bad</html>"),
    ],
)
async def test_a_refusal_has_the_message_and_not_its_json(status, body, expected):
    async def refuse(request: web.Request) -> web.Response:
        del request
        return web.Response(status=status, text=body)

    application = web.Application()
    application.router.add_get("/", refuse)
    async with TestServer(application) as server:
        client = StreamingClient(str(server.make_url("")))
        with pytest.raises(ConfigError) as caught:
            await client.call("GET", "/")
        await client.close()
    assert str(caught.value) == expected


async def test_an_absent_server_is_the_exchanges_error():
    client = StreamingClient("http://127.0.0.1:9")
    exchange = Exchange(REQUEST)
    await client.stream("/v1/completions", b"{}", exchange)
    assert "Cannot connect to host" in exchange.error
    assert not await client.is_up("/")
    with pytest.raises(ConfigError, match=naming("http://127.0.0.1:9")):
        await client.call("GET", "/")
    await client.close()


def test_a_stream_that_breaks_is_reported():
    data = [b'data: {"choices": [{"text": "ab"}]}\n', b'data: {"error": {"message": "lost"}}\n']
    exchange = Exchange(REQUEST, chunks=list(enumerate(data)))
    response = read_completion(exchange)
    assert response.text == "ab"
    assert "lost" in response.error
    garbled = read_completion(Exchange(REQUEST, chunks=[(0, b"data: {nonsense\n")]))
    assert "is not a chunk" in garbled.error


def test_what_a_server_may_leave_out():
    data = [
        b'data: {"choices": [{"text": null}], "usage": null}\n',
        b'data: {"choices": [], "usage": {"prompt_tokens": 4, "completion_tokens": 1, '
        b'"prompt_tokens_details": null}}\n',
        b"data: [DONE]\n",
    ]
    response = read_completion(Exchange(REQUEST, chunks=list(enumerate(data))))
    assert (response.error, response.text, response.chunk_ns) == (None, "", (0,))
    assert (response.num_prompt_tokens, response.num_output_tokens) == (4, 1)
    assert response.num_cached_tokens == 0
