"""Limits of HTTP connections, over raw sockets."""

import asyncio
import contextlib
import json

import pytest
from starlette.applications import Starlette
from starlette.datastructures import State
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from loraplex.app import http_guard
from loraplex.app.access import refusal
from loraplex.app.http_server import serving_http
from loraplex.app.serving_process import bind
from loraplex.core.errors import ConfigError, NotReadyError
from loraplex.core.server_config import ServerConfig
from loraplex.frontends.body_limits import BodyMemory
from loraplex.frontends.direct_writes import DIRECT
from loraplex.frontends.long_json import SENT_BYTES
from loraplex.frontends.middleware import RequestMiddleware
from loraplex.frontends.telemetry.connections import HttpConnections
from loraplex.frontends.telemetry.telemetry import Telemetry
from loraplex.serving.response_memory import ResponseMemory
from support.naming import naming
from support.skipping_loop import SkippingLoop, settle, skip

GET = b"GET / HTTP/1.1\r\nhost: x\r\n"
new_event_loop = SkippingLoop


def test_an_address_that_is_not_ours():
    with pytest.raises(ConfigError, match=naming("203.0.113.1:0")):
        bind("203.0.113.1", 0)
    with bind("127.0.0.1", 0) as listener:
        assert listener.getsockname()[1] > 0


async def _echo(request: Request) -> Response:
    body = await request.body()
    return PlainTextResponse(f"{len(body)} of {request.client.host}")


async def _early(request: Request) -> Response:
    del request
    return PlainTextResponse("early")


async def _stream(request: Request) -> Response:
    del request

    async def chunks():
        yield b"first"
        await asyncio.sleep(60)

    return StreamingResponse(chunks())


async def _waiting(request: Request) -> Response:
    while (await request.receive())["type"] != "http.disconnect":
        pass
    request.app.state.left.set()
    return PlainTextResponse("nobody reads this")


_LONG_BYTES = 32 << 20
"""More than a system takes for a client that does not read."""


async def _long(request: Request) -> Response:
    del request
    return Response(bytes(_LONG_BYTES))


async def _endless(request: Request) -> Response:
    async def chunks():
        try:
            while True:
                request.app.state.num_chunks += 1
                yield bytes(100_000)
                await asyncio.sleep(0)
        finally:
            request.app.state.left.set()

    return StreamingResponse(chunks())


class _Direct(Response):
    """Writes all but its head and its end without `send`, while the client reads."""

    async def __call__(self, scope, receive, send) -> None:
        direct = scope[DIRECT]
        start = {"type": "http.response.start", "status": 200, "headers": []}
        await send(start)
        direct.write(b"first")
        num_bytes = int(scope["query_string"])
        while direct.is_writable and num_bytes:
            direct.write(bytes(100_000))
            num_bytes -= 100_000
        scope["app"].state.left.set()
        await send({"type": "http.response.body", "body": b"last"})
        assert not direct.is_writable or num_bytes == 0


async def _direct(request: Request) -> Response:
    del request
    return _Direct()


class Raw:
    """One connection, byte by byte."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def response(self) -> tuple[int, dict[str, str], bytes]:
        """(status, headers, body)"""
        async with asyncio.timeout(60):
            head = (await self.reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
            body = await self.reader.readexactly(int(headers.get("content-length", 0)))
        return int(head[0].split()[1]), headers, body

    async def is_closed(self) -> bool:
        """Whether the server has closed it by now."""
        await settle()
        return self.reader.at_eof() or self.reader.exception() is not None


class Port:
    """A small app on a port with limits."""

    def __init__(self, number: int, connections: HttpConnections, state: State) -> None:
        self.number, self.connections = number, connections
        self.left = state.left
        """Event that is set when a waiting client has left."""
        self._state = state
        self._stack = contextlib.AsyncExitStack()

    async def connect(self) -> Raw:
        raw = Raw(*await asyncio.open_connection("127.0.0.1", self.number))
        self._stack.callback(raw.writer.close)
        return raw

    async def is_stuck(self) -> None:
        """Wait until a stream without end has no place for more."""
        num_before = -1
        while num_before < self._state.num_chunks:
            num_before = self._state.num_chunks
            await settle()

    async def close(self) -> None:
        await self._stack.aclose()


@pytest.fixture
async def port():
    """A function (**settings) -> Port."""
    async with contextlib.AsyncExitStack() as stack:

        async def start(is_draining: bool = False, **settings) -> Port:
            config = ServerConfig(**settings)
            routes = [
                Route("/early", _early, methods=["POST"]),
                Route("/stream", _stream),
                Route("/long", _long),
                Route("/endless", _endless),
                Route("/direct", _direct),
                Route("/waiting", _waiting, methods=["POST"]),
                Route("/v1/uploads/early", _early, methods=["PUT"]),
                Route("/{path:path}", _echo, methods=["GET", "POST", "PUT"]),
            ]
            inner = Starlette(routes=routes)
            inner.state.left = asyncio.Event()
            inner.state.num_chunks = 0
            app = RequestMiddleware(
                inner,
                Telemetry(),
                BodyMemory(),
                ResponseMemory(),
                refusal,
                is_draining=lambda: is_draining,
            )
            connections = HttpConnections()
            number = await stack.enter_async_context(serving_http(app, config, 0, connections))
            port = Port(number, connections, inner.state)
            stack.push_async_callback(port.close)
            return port

        yield start


async def refused(raw: Raw, status: int, code: str) -> str:
    """The message of a refusal, after which the connection is closed."""
    got, headers, body = await raw.response()
    error = json.loads(body)["error"]
    assert (got, error["code"]) == (status, code)
    assert headers["content-type"] == "application/json"
    assert headers["connection"] == "close"
    assert await raw.is_closed()
    return error["message"]


async def test_a_request_within_all_limits(port):
    raw = await (await port()).connect()
    raw.send(b"POST /a HTTP/1.1\r\nhost: x\r\ncontent-length: 3\r\n\r\nabc")
    status, headers, body = await raw.response()
    assert (status, body) == (200, b"3 of 127.0.0.1")
    assert len(headers["x-request-id"]) == 32
    assert "server" not in headers
    raw.send(GET + b"\r\n")
    assert (await raw.response())[0] == 200


@pytest.mark.parametrize("is_slow", [False, True])
async def test_a_long_request_line(port, is_slow):
    raw = await (await port(max_request_line_bytes=300, max_header_bytes=1024)).connect()
    if is_slow:
        raw.send(b"GET /" + b"a" * 2000)
    else:
        raw.send(b"GET /" + b"a" * 300 + b" HTTP/1.1\r\nhost: x\r\n\r\n")
    assert "300 bytes" in await refused(raw, 414, "request_line_too_long")


@pytest.mark.parametrize("end", [b"", b"\r\n\r\n"])
async def test_large_headers(port, end):
    raw = await (await port(max_header_bytes=2000)).connect()
    raw.send(GET + b"a: " + b"x" * 3000 + end)
    assert "2000 bytes" in await refused(raw, 431, "headers_too_large")


async def test_many_headers(port):
    raw = await (await port(max_headers=10)).connect()
    raw.send(GET + b"a: b\r\n" * 10 + b"\r\n")
    assert "10 headers" in await refused(raw, 431, "too_many_headers")


async def test_no_http(port):
    server = await port()
    raw = await server.connect()
    raw.send(b"\x16\x03\x01 hello\r\n\r\n")
    assert "not HTTP" in await refused(raw, 400, "invalid_request")
    assert server.connections.num_refused == {"invalid_request": 1}


async def test_headers_that_trickle(port):
    raw = await (await port(header_timeout_seconds=30)).connect()
    raw.send(GET)
    for _ in range(4):
        await skip(7)
        raw.send(b"a: b\r\n")
    assert not await raw.is_closed()
    await skip(2.1)
    assert "30 seconds" in await refused(raw, 408, "header_timeout")


async def test_headers_that_trickle_on_a_used_connection(port):
    raw = await (await port(header_timeout_seconds=30, keep_alive_seconds=60)).connect()
    raw.send(GET + b"\r\n")
    assert (await raw.response())[0] == 200
    await skip(59)
    raw.send(b"GET / HT")
    await skip(29)
    assert not await raw.is_closed()
    await skip(1.1)
    await refused(raw, 408, "header_timeout")


async def test_a_connection_that_says_nothing(port):
    server = await port(header_timeout_seconds=30)
    raw = await server.connect()
    await skip(29)
    assert not await raw.is_closed()
    await skip(1.1)
    assert await raw.is_closed()
    assert server.connections.num_refused == {"idle": 1}


async def test_an_idle_connection(port):
    raw = await (await port(keep_alive_seconds=5)).connect()
    raw.send(GET + b"\r\n")
    assert (await raw.response())[0] == 200
    await skip(5.1)
    assert await raw.is_closed()


async def test_a_connection_in_use_is_not_idle(port):
    raw = await (await port(keep_alive_seconds=5, header_timeout_seconds=1)).connect()
    for _ in range(4):
        raw.send(GET + b"\r\n")
        assert (await raw.response())[0] == 200
        await skip(4)
    assert not await raw.is_closed()


async def test_a_body_that_trickles_and_one_in_time(port):
    raw = await (await port(body_timeout_seconds=30)).connect()
    for _ in range(2):
        raw.send(b"POST /a HTTP/1.1\r\nhost: x\r\ncontent-length: 3\r\n\r\n")
        await skip(20)
        raw.send(b"abc")
        assert (await raw.response())[0] == 200
    raw.send(b"POST /a HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n")
    for _ in range(4):
        raw.send(b"x")
        await skip(7)
    assert not await raw.is_closed()
    await skip(2.1)
    status, headers, _ = await raw.response()
    assert (status, headers["connection"]) == (500, "close"), "this app has no handler for it"
    assert await raw.is_closed()


async def test_an_upload_has_the_time_of_a_body_for_each_mebibyte(port):
    raw = await (await port(body_timeout_seconds=30)).connect()
    head = b"PUT /v1/uploads/1/x HTTP/1.1\r\nhost: x\r\ncontent-length: 9999999\r\n\r\n"
    raw.send(head)
    for _ in range(3):
        raw.send(b"x" * (1 << 20))
        await settle()
        await skip(29)
    assert not await raw.is_closed()
    await skip(2)
    await skip(31)
    assert (await raw.response())[0] == 500, "this app has no handler for it"
    assert await raw.is_closed()


async def test_after_its_response_an_upload_has_the_time_of_one_body(port):
    raw = await (await port(body_timeout_seconds=30)).connect()
    head = b"PUT /v1/uploads/early HTTP/1.1\r\nhost: x\r\ncontent-length: 9999999\r\n\r\n"
    raw.send(head)
    assert (await raw.response())[0] == 200
    for _ in range(4):
        raw.send(b"x" * (1 << 20))
        await settle()
        await skip(7)
    assert not await raw.is_closed()
    await skip(2.1)
    assert await raw.is_closed()


async def test_a_long_response_is_no_idle_connection(port):
    limits = {"keep_alive_seconds": 5, "header_timeout_seconds": 5}
    raw = await (await port(body_timeout_seconds=5, **limits)).connect()
    raw.send(b"GET /stream HTTP/1.1\r\nhost: x\r\n\r\n")
    await raw.reader.readuntil(b"first")
    await raw.reader.readline()
    await skip(50)
    assert not await raw.is_closed()


async def test_a_response_that_is_not_read(port):
    server = await port(body_timeout_seconds=30)
    raw = await server.connect()
    raw.send(b"GET /long HTTP/1.1\r\nhost: x\r\n\r\n")
    await skip(29)
    assert server.connections.num_open == 1
    await skip(2)
    assert server.connections.num_open == 0
    assert server.connections.num_refused == {"unread": 1}
    with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
        await raw.response()


async def test_a_response_has_the_time_for_each_256_kibibytes(port):
    server = await port(body_timeout_seconds=30)
    raw = await server.connect()
    raw.send(b"GET /long HTTP/1.1\r\nhost: x\r\n\r\n")
    await raw.reader.readuntil(b"\r\n\r\n")
    left = _LONG_BYTES
    while left:
        await skip(29)
        left -= len(await raw.reader.readexactly(min(left, 4 << 20)))
    assert server.connections.num_open == 1


async def test_a_stream_that_is_not_read_ends(port):
    server = await port(body_timeout_seconds=30)
    raw = await server.connect()
    raw.send(b"GET /endless HTTP/1.1\r\nhost: x\r\n\r\n")
    await settle()
    await server.is_stuck()
    await skip(29)
    assert not server.left.is_set()
    await skip(2)
    await server.left.wait()
    assert server.connections.num_refused == {"unread": 1}


async def test_a_closed_connection_whose_last_bytes_are_not_read(port):
    server = await port(body_timeout_seconds=30, keep_alive_seconds=1)
    raw = await server.connect()
    raw.send(b"GET /long HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
    await skip(31)
    assert server.connections.num_open == 0


async def test_the_rest_of_a_body_with_a_response_keeps_no_connection(port):
    raw = await (await port(body_timeout_seconds=30)).connect()
    raw.send(b"POST /early HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n")
    assert (await raw.response())[0] == 200
    for _ in range(4):
        await skip(7)
        raw.send(b"x")
    assert not await raw.is_closed()
    await skip(2.1)
    assert await raw.is_closed()


async def test_a_connection_is_idle_after_the_rest_of_a_body_with_a_response(port):
    raw = await (await port(header_timeout_seconds=30)).connect()
    raw.send(b"POST /early HTTP/1.1\r\nhost: x\r\ncontent-length: 4\r\n\r\n")
    assert (await raw.response())[0] == 200
    raw.send(b"rest" + GET + b"\r\n")
    assert (await raw.response())[0] == 200
    raw.send(b"POST /early HTTP/1.1\r\nhost: x\r\ncontent-length: 4\r\n\r\n")
    assert (await raw.response())[0] == 200
    raw.send(b"rest")
    await skip(30.1)
    assert await raw.is_closed()


@pytest.mark.parametrize("behind", [b"\r\n", GET + b"\r\n", b"x" * 10])
async def test_a_client_that_leaves_is_noticed_after_its_early_bytes(port, behind):
    server = await port()
    raw = await server.connect()
    raw.send(b"POST /waiting HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\n\r\nx" + behind)
    await settle()
    assert not server.left.is_set()
    raw.writer.close()
    async with asyncio.timeout(60):
        await server.left.wait()


async def test_blank_lines_begin_no_request(port):
    raw = await (await port(header_timeout_seconds=1, keep_alive_seconds=20)).connect()
    raw.send(b"\r\n" + GET + b"\r\n\r\n")
    assert (await raw.response())[0] == 200
    raw.send(b"\r\n")
    await skip(10)
    raw.send(GET + b"\r\n")
    assert (await raw.response())[0] == 200
    await skip(20.1)
    assert await raw.is_closed(), "without a response"


async def test_a_client_without_continue_sends_no_other_request(port):
    raw = await (await port()).connect()
    head = b"POST /early HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\nexpect: 100-continue\r\n\r\n"
    raw.send(head)
    status, headers, _ = await raw.response()
    assert (status, headers["connection"]) == (200, "close")
    assert await raw.is_closed()


async def test_a_broken_body(port):
    raw = await (await port()).connect()
    raw.send(b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n")
    await refused(raw, 400, "invalid_request")


async def test_idle_connections_make_way_for_others(port):
    """First those without any request, then those between two requests, the oldest first."""
    server = await port(max_connections=3)
    used, busy, unused = [await server.connect() for _ in range(3)]
    used.send(GET + b"\r\n")
    assert (await used.response())[0] == 200
    busy.send(GET)
    await settle()
    fourth = await server.connect()
    fourth.send(GET + b"\r\n")
    assert (await fourth.response())[0] == 200
    assert [await raw.is_closed() for raw in (used, busy, unused)] == [False, False, True]
    fifth = await server.connect()
    fifth.send(GET)
    assert [await raw.is_closed() for raw in (used, busy, fourth)] == [True, False, False]
    assert server.connections.num_open == 3
    assert server.connections.num_refused == {"idle": 2}
    busy.send(b"\r\n")
    assert (await busy.response())[0] == 200


async def test_one_connection_too_many(port):
    server = await port(max_connections=2)
    first, second = await server.connect(), await server.connect()
    for raw in (first, second):
        raw.send(GET + b"\r\n")
        assert (await raw.response())[0] == 200
        raw.send(GET)  # another request has begun
    await settle()
    assert "2 connections" in await refused(await server.connect(), 503, "too_many_connections")
    assert server.connections.num_open == 2
    first.writer.close()
    async with asyncio.timeout(60):
        while server.connections.num_open > 1:
            await asyncio.sleep(0.01)
    third = await server.connect()
    third.send(GET + b"\r\n")
    assert (await third.response())[0] == 200


async def test_a_draining_server_closes_connections(port):
    raw = await (await port(is_draining=True)).connect()
    raw.send(GET + b"\r\n")
    status, headers, _ = await raw.response()
    assert (status, headers["connection"]) == (200, "close")
    assert await raw.is_closed()


@pytest.mark.parametrize(
    ("trusted", "client"), [((), "127.0.0.1"), (("127.0.0.0/8",), "203.0.113.7")]
)
async def test_the_address_of_the_client(port, trusted, client):
    raw = await (await port(trusted_proxies=trusted)).connect()
    raw.send(GET + b"x-forwarded-for: 203.0.113.7\r\n\r\n")
    assert (await raw.response())[2].decode() == f"0 of {client}"


async def sent_when_stopped(data: bytes, seconds_left: float = 0.0, pause: float = 0.0) -> bytes:
    """Return what a server sends that stops once it has these bytes.

    pause: seconds between the first piece of a response and its last.
    """
    loop = asyncio.get_running_loop()
    started = loop.time()

    async def app(scope, receive, send) -> None:
        status, message = 200, {"more_body": True}
        try:
            while message["more_body"]:
                message = await receive()
        except NotReadyError:
            status = 503
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": b"first", "more_body": True})
        await asyncio.sleep(pause)
        await send({"type": "http.response.body", "body": b"last"})

    def left() -> float:
        return started + seconds_left - loop.time()

    async def pass_time() -> None:
        while True:
            await skip(0.2)

    serving = serving_http(app, ServerConfig(), 0, HttpConnections(), seconds_left=left)
    async with serving as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(data)
        await settle()
        time_passes = asyncio.create_task(pass_time())
    sent = await reader.read()
    writer.close()
    time_passes.cancel()
    return sent


async def test_a_stop_waits_for_no_body():
    data = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\nabc"
    sent = await sent_when_stopped(data)
    assert sent.startswith(b"HTTP/1.1 503 ")
    assert b"connection: close" in sent


async def test_a_stop_lets_responses_end_in_its_time():
    assert b"last" not in await sent_when_stopped(GET + b"\r\n", pause=30.0)
    assert b"last" in await sent_when_stopped(GET + b"\r\n", pause=30.0, seconds_left=60.0)


async def test_other_tasks_run_between_the_parts_of_a_long_body():
    ran, seen = [], []

    async def run() -> None:
        while True:
            ran.append(len(seen))
            await asyncio.sleep(0)

    async def send(message) -> None:
        seen.append(len(ran))

    task = asyncio.create_task(run())
    body = {"type": "http.response.body", "body": bytes(4 * SENT_BYTES)}
    await http_guard._send_in_parts(body, send)
    task.cancel()
    assert len(set(seen)) == len(seen) == 4


async def test_parts_that_are_written_directly(port):
    server = await port()
    raw = await server.connect()
    raw.send(b"GET /direct?0 HTTP/1.1\r\nhost: x\r\n\r\n")
    head = await raw.reader.readuntil(b"\r\n\r\n")
    assert b"transfer-encoding: chunked" in head
    body = await raw.reader.readuntil(b"0\r\n\r\n")
    assert body == b"5\r\nfirst\r\n4\r\nlast\r\n0\r\n\r\n"
    raw.send(b"GET /early-on HTTP/1.1\r\nhost: x\r\n\r\n")
    assert (await raw.response())[0] == 200


async def test_direct_parts_end_where_a_client_does_not_read(port):
    server = await port()
    raw = await server.connect()
    raw.writer.transport.pause_reading()
    raw.send(b"GET /direct?%d HTTP/1.1\r\nhost: x\r\n\r\n" % (_LONG_BYTES * 100))
    async with asyncio.timeout(60):
        await server.left.wait()
        raw.writer.transport.resume_reading()
        end = b""
        while not end.endswith(b"4\r\nlast\r\n0\r\n\r\n"):
            end = end[-100:] + await raw.reader.read(1 << 20)
