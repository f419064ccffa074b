"""Requests are delimited over raw sockets such that no intermediary can read them otherwise."""

import asyncio
import contextlib
import json
import re

import pytest

from loraplex.app.http_server import serving_http
from loraplex.core.server_config import ServerConfig
from loraplex.frontends.telemetry.connections import HttpConnections
from support.naming import naming
from support.skipping_loop import SkippingLoop, settle, skip

new_event_loop = SkippingLoop
GET = b"GET / HTTP/1.1\r\nhost: x\r\n"
POST = b"POST / HTTP/1.1\r\nhost: x\r\n"
CHUNKED = POST + b"transfer-encoding: chunked\r\n"
NEXT = b"GET /next HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
BODY = b"3\r\nabc\r\n"
"""The first chunk of one."""


class App:
    """ASGI app that responds with what it received: method, path, body and headers."""

    def __init__(self) -> None:
        self.paths: list[str] = []
        self.goes_on = asyncio.Event()
        self.goes_on.set()
        self.header = (b"x", b"y")

    async def __call__(self, scope, receive, send) -> None:
        self.paths.append(scope["path"])
        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body, more = body + message["body"], message["more_body"]
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        received = [scope["method"], scope["path"], body.decode(), headers]
        await self.goes_on.wait()
        await send({"type": "http.response.start", "status": 200, "headers": [self.header]})
        content = json.dumps(received).encode()
        await send({"type": "http.response.body", "body": content[:9], "more_body": True})
        await send({"type": "http.response.body", "body": content[9:]})


class RecordedServer:
    def __init__(self, app: App, connections: HttpConnections, port: int) -> None:
        self.app, self.connections, self.port = app, connections, port

    @contextlib.asynccontextmanager
    async def connected(self):
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            async with asyncio.timeout(60):
                yield reader, writer
        finally:
            writer.close()

    async def send(self, data: bytes, size: int = 0) -> bytes:
        """All that is said to these bytes, sent `size` at a time, until the connection ends."""
        async with self.connected() as (reader, writer):
            for start in range(0, len(data), size or len(data)):
                writer.write(data[start : start + (size or len(data))])
                if size:
                    await settle()
            return await reader.read()


@pytest.fixture
async def start_server():
    """Return a function (**settings) -> RecordedServer."""
    async with contextlib.AsyncExitStack() as stack:

        async def start(**settings) -> RecordedServer:
            app, connections = App(), HttpConnections()
            settings = ServerConfig(**settings)
            serving = serving_http(app, settings, 0, connections)
            return RecordedServer(app, connections, await stack.enter_async_context(serving))

        yield start


def replies_in(data: bytes) -> list[list]:
    """Return what the app sent in each response."""
    return [json.loads(b"".join(_chunks(body))) for body in data.split(b"HTTP/1.1 200 OK\r\n")[1:]]


def _chunks(data: bytes):
    _, _, rest = data.partition(b"\r\n\r\n")
    while True:
        length, _, rest = rest.partition(b"\r\n")
        if not (size := int(length, 16)):
            assert rest == b"\r\n"
            return
        yield rest[:size]
        rest = rest[size + 2 :]


def refusal(data: bytes) -> tuple[int, str]:
    """(status, message)"""
    head, _, body = data.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["error"]["message"]


@pytest.mark.parametrize("size", [0, 1, 2, 3, 7, 50])
async def test_requests_at_once_are_served_one_by_one(start_server, size):
    server = await start_server()
    chunks = BODY + b"4\r\n\r\n\r\n\r\n2;a=b\r\n0\r\r\n0\r\nx: y\r\n\r\n"
    data = b"\r\n" + GET + b"\r\n" + CHUNKED + b"\r\n" + chunks
    data += POST + b"content-length: 9\r\n\r\nde\r\n\r\nfgh" + NEXT
    received = replies_in(await server.send(data, size))
    assert [each[:3] for each in received] == [
        ["GET", "/", ""],
        ["POST", "/", "abc\r\n\r\n0\r"],
        ["POST", "/", "de\r\n\r\nfgh"],
        ["GET", "/next", ""],
    ]


@pytest.mark.parametrize(
    ("status", "head"),
    [
        (400, POST + b"content-length: 5\r\ntransfer-encoding: chunked\r\n"),
        (400, CHUNKED + b"content-length: 5\r\n"),
        (400, POST + b"content-length: 5\r\ncontent-length: 6\r\n"),
        (400, POST + b"content-length: 5, 5\r\n"),
        (400, POST + b"content-length: +5\r\n"),
        (400, POST + b"transfer-encoding : chunked\r\n"),
        (400, POST + b"transfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n"),
        (501, POST + b"transfer-encoding: gzip, chunked\r\n"),
        (501, POST + b"transfer-encoding: identity\r\ntransfer-encoding: chunked\r\n"),
        (501, POST + b"transfer-encoding: xchunked\r\n"),
        (400, POST + b"a: b\n"),
        (400, POST + b"a: b\rc: d\r\n"),
        (400, POST + b"a: b\r\n c\r\n"),
        (400, POST + b"a: b\0\r\n"),
        (400, POST + b"host: y\r\n"),
        (400, b"POST / HTTP/1.1\r\n"),
        (505, b"POST / HTTP/2.0\r\nhost: x\r\n"),
        (505, b"GET /\r\n"),
        (400, b"CONNECT /a HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\n"),
        (400, b"BREW / HTTP/1.1\r\nhost: x\r\n"),
    ],
)
async def test_what_could_be_read_in_two_ways_is_refused(start_server, status, head):
    server = await start_server()
    assert refusal(await server.send(head + b"\r\n0\r\n\r\n" + NEXT))[0] == status
    assert server.app.paths == []
    assert server.connections.num_refused == {"invalid_request": 1}


@pytest.mark.parametrize(
    "body", [b"0x3\r\nabc\r\n", b"3\nabc\r\n", b"3\r\nabcd\r\n", b"-1\r\n", b"3;a\nb\r\nabc\r\n"]
)
async def test_a_broken_chunk(start_server, body):
    server = await start_server()
    status, message = refusal(await server.send(CHUNKED + b"\r\n" + body + b"0\r\n\r\n" + NEXT))
    assert status == 400
    assert re.search(naming("HTTP"), message)


async def test_headers_behind_the_body_are_none(start_server):
    server = await start_server()
    trailers = b"0\r\nauthorization: Bearer x\r\nhost: y\r\n\r\n"
    received = replies_in(await server.send(CHUNKED + b"\r\n" + BODY + trailers + NEXT))
    assert received[0] == ["POST", "/", "abc", {"host": "x", "transfer-encoding": "chunked"}]
    assert len(received) == 2


@pytest.mark.parametrize("endless", [b"0\r\na: ", b"3;a="])
async def test_bytes_without_an_end_in_a_body(start_server, endless):
    server = await start_server(max_header_bytes=2000)
    data = CHUNKED + b"\r\n" + BODY + endless
    async with server.connected() as (reader, writer):
        writer.write(data)
        for _ in range(3):
            await settle()
            writer.write(b"x" * 1000)
        assert refusal(await reader.read())[0] == 431


@pytest.mark.parametrize("size", [0, 1])
@pytest.mark.parametrize(
    "body",
    [b"content-length: 3\r\n\r\nabc", b"transfer-encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n"],
)
async def test_an_offer_of_another_protocol_is_served_in_this_one(start_server, size, body):
    server = await start_server()
    offer = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AA\r\n"
    received = replies_in(await server.send(POST + offer + body + NEXT, size))
    assert [each[:3] for each in received] == [["POST", "/", "abc"], ["GET", "/next", ""]]
    assert received[0][3]["http2-settings"] == "AA"


async def test_a_client_that_waits_for_continue(start_server):
    server = await start_server()
    async with server.connected() as (reader, writer):
        writer.write(POST + b"content-length: 3\r\nexpect: 100-continue\r\n\r\n")
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(b"abc" + NEXT)
        assert [each[2] for each in replies_in(await reader.read())] == ["abc", ""]


async def test_http_1_0(start_server):
    server = await start_server()
    data = b"POST / HTTP/1.0\r\ncontent-length: 3\r\n\r\nabc"
    assert [each[2] for each in replies_in(await server.send(data + NEXT))] == ["abc"]
    assert server.app.paths == ["/"]


async def test_head_has_no_body(start_server):
    server = await start_server()
    data = await server.send(b"HEAD / HTTP/1.1\r\nhost: x\r\n\r\n" + NEXT)
    assert re.match(rb"HTTP/1.1 200 OK\r\n([a-z-]+: [^\r]+\r\n)+\r\nHTTP/1.1 200 OK\r\n", data)


async def test_blanks_around_a_value_are_no_part_of_it(start_server):
    server = await start_server()
    (received,) = replies_in(await server.send(GET + b"a: \t b \t \r\nconnection: close\r\n\r\n"))
    assert received[3]["a"] == "b"


@pytest.mark.parametrize(("target", "path"), [(b"http://x/a%20b?c#d", "/a b"), (b"*", "*")])
async def test_targets(start_server, target, path):
    server = await start_server()
    await server.send(b"GET %b HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n" % target)
    assert server.app.paths == [path]


async def test_a_response_is_not_broken_by_what_follows_its_request(start_server):
    server = await start_server(header_timeout_seconds=10)
    server.app.goes_on.clear()
    async with server.connected() as (reader, writer):
        writer.write(GET + b"\r\nGET / HT")
        await skip(15)
        writer.write(b"TP/9\r\n\r\n")
        await settle()
        server.app.goes_on.set()
        data = await reader.read()
    good, bad = data[: data.index(b"HTTP/1.1 400")], data[data.index(b"HTTP/1.1 400") :]
    assert replies_in(good)[0][:2] == ["GET", "/"]
    assert refusal(bad)[0] == 400


async def test_what_comes_before_its_turn_is_not_read_without_end(start_server):
    server = await start_server()
    server.app.goes_on.clear()
    async with server.connected() as (_, writer):
        writer.write((GET + b"\r\n") * 800_000)
        await settle()
        left = writer.transport.get_write_buffer_size()
        await settle()
        assert left == writer.transport.get_write_buffer_size() > 1 << 20
        assert server.app.paths == ["/"]
        server.app.goes_on.set()
        for _ in range(5):
            await settle()
        assert len(server.app.paths) > 10
        writer.transport.abort()


@pytest.mark.parametrize("header", [(b"a", b"b\r\nset-cookie: c"), (b"a: b\r\nc", b"d")])
async def test_no_header_of_a_response_begins_another(start_server, header):
    server = await start_server()
    server.app.header = header
    assert await server.send(GET + b"\r\n") == b""
