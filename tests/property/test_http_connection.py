"""However the bytes of a connection are cut, they are the same requests with the same responses."""

import asyncio
import dataclasses
import itertools
import json
import logging
import random
from collections.abc import Callable, Sequence
from typing import Any

import h11
import pytest
import uvicorn
from hypothesis import given
from hypothesis import strategies as st
from uvicorn.server import ServerState

from loraplex.app.http_guard import ConnectionGuard, ConnectionLimits, GuardedApp
from loraplex.frontends.telemetry.connections import HttpConnections
from support.examples import examples, num_examples

SEEDS = st.integers(0, 2**32 - 1)
LIMITS = ConnectionLimits(
    max_connections=10,
    max_headers=50,
    max_header_bytes=1 << 16,
    max_request_line_bytes=1 << 13,
    header_timeout_seconds=600,
    body_timeout_seconds=600,
)
GO_ON = b"HTTP/1.1 100 Continue\r\n\r\n"
NUM_IDLE_TURNS = 12
"""Turns of the event loop: more than any request here needs for its response."""


# ---------------------------------------------------------------- a server without a socket


async def app(scope: Any, receive: Any, send: Any) -> None:
    """ASGI app that responds with what it received; some of its responses are streams."""
    body, more = b"", True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        body, more = body + message["body"], message["more_body"]
    names = sorted(name.decode("latin-1") for name, _ in scope["headers"])
    received = [
        scope["method"],
        scope["path"],
        scope["query_string"].decode("latin-1"),
        body.hex(),
        *names,
    ]
    received.append(dict(scope["headers"]).get(b"x-a", b"").decode("latin-1"))
    content = json.dumps(received).encode()
    is_stream = len(body) % 2 == 1
    length = [] if is_stream else [(b"content-length", b"%d" % len(content))]
    await send({"type": "http.response.start", "status": 200, "headers": length})
    if is_stream:
        await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": content[:5], "more_body": True})
    await send({"type": "http.response.body", "body": content[5:] if is_stream else content})


CONFIG = uvicorn.Config(
    GuardedApp(app),
    http="httptools",
    interface="asgi3",
    lifespan="off",
    ws="none",
    log_config=None,
    proxy_headers=False,
)
CONFIG.load()


class FakeTransport(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__()
        self.sent = bytearray()
        self.may_read = asyncio.Event()
        self.may_read.set()
        self._is_closing = False

    def write(self, data: Any) -> None:
        if not self._is_closing:
            self.sent += data

    def get_write_buffer_size(self) -> int:
        return 0

    def close(self) -> None:
        self._is_closing = True
        self.may_read.set()

    def is_closing(self) -> bool:
        return self._is_closing

    def pause_reading(self) -> None:
        self.may_read.clear()

    def resume_reading(self) -> None:
        self.may_read.set()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return {"sockname": ("127.0.0.1", 1), "peername": ("127.0.0.1", 2)}.get(name, default)


class Heard(logging.Handler):
    """What a server would have logged: with these requests, nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))


async def said_to(pieces: Sequence[bytes], turns: Callable[[], int]) -> tuple[bytes, bool]:
    """Return what a server sends for these bytes, and whether it has closed.

    turns: turns of the event loop between two pieces.
    """
    problems: list[Any] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: problems.append(context))
    heard = Heard()
    logging.getLogger("uvicorn.error").addHandler(heard)
    state, transport = ServerState(), FakeTransport()
    connection = ConnectionGuard(
        CONFIG.http_protocol_class,
        LIMITS,
        HttpConnections(),
        {},
        config=CONFIG,
        server_state=state,
        app_state={},
        _loop=loop,
    )
    connection.connection_made(transport)
    try:
        for piece in pieces:
            await transport.may_read.wait()
            if transport.is_closing():
                break
            connection.data_received(piece)
            await _turns(turns())
        await _turns(NUM_IDLE_TURNS * 8)
        sent, is_closing = bytes(transport.sent), transport.is_closing()
        connection.connection_lost(None)
        await _turns(NUM_IDLE_TURNS)
        assert not state.tasks, "an application was left waiting"
    finally:
        logging.getLogger("uvicorn.error").removeHandler(heard)
    assert not problems
    assert not heard.lines
    return sent, is_closing


async def _turns(number: int) -> None:
    for _ in range(number):
        await asyncio.sleep(0)


def said(data: bytes, seed: int | None = None) -> tuple[bytes, bool]:
    """Return what a server sends for all bytes at once or, with a seed, in pieces."""
    if seed is None:
        return asyncio.run(said_to([data], lambda: 0))
    rng = random.Random(seed)
    most = rng.choice([0, 1, NUM_IDLE_TURNS])
    return asyncio.run(said_to(pieces_of(rng, data), lambda: rng.randint(0, most)))


def pieces_of(rng: random.Random, data: bytes) -> list[bytes]:
    if rng.random() < 0.2:
        return [data[i : i + 1] for i in range(len(data))]
    cuts = sorted(rng.randint(0, len(data)) for _ in range(rng.randint(1, 12)))
    edges = [0, *cuts, len(data)]
    return [data[a:b] for a, b in itertools.pairwise(edges) if a < b]


# ---------------------------------------------------------------- requests


@dataclasses.dataclass(frozen=True)
class SentRequest:
    data: bytes
    expected: list[str]
    """Content that the application sends for it."""
    is_continued: bool
    """Its client waits for 100 Continue before it sends the body."""


def request(rng: random.Random, *, is_last: bool) -> SentRequest:
    method = rng.choice(["GET", "POST", "PUT", "HEAD", "DELETE", "OPTIONS"])
    path, query = rng.choice(["/", "/v2/models/a/infer", "/x" * 40]), rng.choice(["", "a=b&c"])
    target = path + (f"?{query}" if query else "")
    version = rng.choice(["1.0", "1.1"]) if is_last else "1.1"
    headers = ["Host: x", "X-A:  b \t", "Cookie: " + "c" * rng.randint(0, 90)]
    body = bytes(rng.choice(b"\r\n:ab0 ") for _ in range(rng.choice([0, 0, 1, 2, 30, 301])))
    is_continued = False
    sent = b""
    if method not in ("GET", "HEAD") or rng.random() < 0.1:
        if version == "1.1" and rng.random() < 0.5:
            headers.append("Transfer-Encoding: chunked")
            sent = chunked(rng, body)
        else:
            headers.append(f"Content-Length: {len(body)}")
            sent = body
        is_continued = version == "1.1" and rng.random() < 0.15
    else:
        body = b""
    if is_continued:
        headers.append("Expect: 100-continue")
    if is_last:
        headers.append(rng.choice(["Connection: close", "Connection: keep-alive"]))
    elif rng.random() < 0.1:
        headers += ["Connection: Upgrade", "Upgrade: websocket"]
    rng.shuffle(headers)
    lines = [f"{method} {target} HTTP/{version}", *headers, "", ""]
    names = sorted(name for name in names_of(headers) if name != "upgrade")
    expected = [method, path, query, body.hex(), *names, "b"]
    return SentRequest("\r\n".join(lines).encode() + sent, expected, is_continued)


def names_of(headers: Sequence[str]) -> list[str]:
    return [header.partition(":")[0].lower() for header in headers]


def chunked(rng: random.Random, body: bytes) -> bytes:
    data = b""
    while body:
        size = rng.randint(1, len(body))
        data += b"%x%b\r\n%b\r\n" % (size, rng.choice([b"", b";a=b"]), body[:size])
        body = body[size:]
    return data + b"0\r\n" + rng.choice([b"", b"X-Trailer: y\r\n"]) + b"\r\n"


def conversation(seed: int) -> list[SentRequest]:
    rng = random.Random(seed)
    number = rng.randint(1, 5)
    return [request(rng, is_last=index == number - 1) for index in range(number)]


def responses_in(data: bytes, methods: Sequence[str]) -> list[tuple[int, bytes]]:
    """(status, body) of each, read as another's client reads them."""
    found = []
    for method in methods:
        if not data:
            break
        client = h11.Connection(h11.CLIENT)
        client.send(h11.Request(method=method, target="/", headers=[("host", "x")]))
        client.send(h11.EndOfMessage())
        client.receive_data(data)
        client.receive_data(b"")
        status, body = 0, b""
        while not isinstance(event := client.next_event(), h11.EndOfMessage):
            assert event is not h11.NEED_DATA
            assert event is not h11.PAUSED
            if isinstance(event, h11.Response):
                status = event.status_code
            elif isinstance(event, h11.Data):
                body += event.data
        data = client.trailing_data[0]
        found.append((status, body))
    assert not data
    return found


def changed(rng: random.Random, data: bytes) -> bytes:
    """A few bytes otherwise, with a liking for those that mean something."""
    parts = [
        b"\r\n",
        b"\r",
        b"\n",
        b":",
        b" ",
        b"0",
        b"\0",
        b"\x80",
        b"\t",
        b"HTTP/1.1",
        b"host: y",
    ]
    parts += [b"transfer-encoding: chunked\r\n", b"content-length: 3\r\n", b"-", b"\r\n\r\n", b","]
    for _ in range(rng.randint(1, 3)):
        at = rng.randint(0, len(data))
        data = data[:at] + rng.choice(parts) + data[at + rng.randint(0, 4) :]
    return data


def final(said: tuple[bytes, bool]) -> tuple[bytes, bool]:
    """Drop the 100 Continue: whether the client still waits for it depends on the time."""
    sent, is_closing = said
    return sent.replace(GO_ON, b""), is_closing


# ---------------------------------------------------------------- tests


@given(seed=SEEDS, cut=st.none() | SEEDS)
def test_requests_are_served_as_they_were_sent(seed: int, cut: int | None) -> None:
    requests = conversation(seed)
    sent, is_closing = said(b"".join(each.data for each in requests), cut)
    found = responses_in(sent, [each.expected[0] for each in requests])
    assert [status for status, _ in found] == [200] * len(requests)
    for each, (_, body) in zip(requests, found, strict=True):
        assert body == b"" if each.expected[0] == "HEAD" else json.loads(body) == each.expected
    assert sent.count(GO_ON) == sum(each.is_continued for each in requests)
    assert is_closing == (b"Connection: close" in requests[-1].data or _is_old(requests[-1]))


def _is_old(sent_request: SentRequest) -> bool:
    return b" HTTP/1.0\r\n" in sent_request.data


@examples(4)
@given(seed=SEEDS, cut=SEEDS)
def test_what_is_broken_is_read_alike_however_it_is_cut(seed: int, cut: int) -> None:
    requests = conversation(seed)
    data = changed(random.Random(seed), b"".join(each.data for each in requests))
    assert final(said(data, cut)) == final(said(data))


@given(data=st.binary(max_size=300), cut=SEEDS)
def test_any_bytes(data: bytes, cut: int) -> None:
    sent, is_closing = said(data, cut)
    assert (sent, is_closing) == said(data)
    assert not sent or is_closing


@pytest.mark.slow
def test_many_broken_conversations() -> None:
    for seed in range(num_examples(50)):
        test_what_is_broken_is_read_alike_however_it_is_cut.hypothesis.inner_test(seed, seed + 1)
