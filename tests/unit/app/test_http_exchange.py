"""How a body is waited for, and how an answer's bytes leave; what those are is in
test_http_protocol.py.
"""

import asyncio

import pytest
from uvicorn.protocols.http.flow_control import FlowControl

from loraplex.app.gathered_writes import GatheredWrites
from loraplex.app.http_exchange import Exchange
from loraplex.core.errors import BodyTimeoutError

LATE = BodyTimeoutError("late")
START = {"type": "http.response.start", "status": 200, "headers": []}


class Socket(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__()
        self.written: list[bytes] = []

    def write(self, data) -> None:
        self.written.append(bytes(data))

    def is_closing(self) -> bool:
        return False

    def close(self) -> None:
        self.written.append(b"closed")


def exchange(socket: Socket) -> Exchange:
    return Exchange(
        scope={"type": "http", "method": "GET", "http_version": "1.1", "path": "/"},
        transport=GatheredWrites(socket, asyncio.get_running_loop()),
        flow=FlowControl(socket),
        default_headers=[],
        expect_100_continue=False,
        keep_alive=True,
        on_response=lambda: None,
    )


def piece(data: bytes, *, more: bool) -> dict:
    return {"type": "http.response.body", "body": data, "more_body": more}


async def test_a_whole_answer_is_one_write_at_once():
    socket = Socket()
    answer = exchange(socket)
    await answer.send(START)
    await answer.send(piece(b"abc", more=False))
    [data] = socket.written
    assert data.startswith(b"HTTP/1.1 200 OK\r\n")
    assert data.endswith(b"3\r\nabc\r\n0\r\n\r\n")


async def test_the_head_of_a_stream_does_not_wait_for_its_first_piece():
    socket = Socket()
    answer = exchange(socket)
    await answer.send(START)
    await asyncio.sleep(0)
    [head] = socket.written
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    assert head.endswith(b"\r\n\r\n")


async def test_pieces_do_not_wait_for_those_that_are_not_there():
    socket = Socket()
    answer = exchange(socket)
    await answer.send(START)
    await answer.send(piece(b"a", more=True))
    await answer.send(piece(b"b", more=True))
    await asyncio.sleep(0)
    [data] = socket.written
    assert data.endswith(b"1\r\na\r\n1\r\nb\r\n")
    await answer.send(piece(b"c", more=True))
    await asyncio.sleep(0)
    assert socket.written[1:] == [b"1\r\nc\r\n"]


async def test_what_was_sent_before_the_application_failed_arrives():
    socket = Socket()
    answer = exchange(socket)

    async def app(scope, receive, send):
        await send(START)
        await send(piece(b"a", more=True))
        raise RuntimeError("a defect")

    await answer.run_asgi(app)
    assert socket.written[0].endswith(b"1\r\na\r\n")
    assert socket.written[1:] == [b"closed"]


PART = {"type": "http.request", "body": b"x", "more_body": True}
END = {"type": "http.request", "body": b"", "more_body": False}


async def test_a_body_in_parts():
    body = exchange(Socket())
    body.take(b"a")
    body.take(b"b")
    assert await body.receive() == {**PART, "body": b"ab"}
    reader = asyncio.create_task(body.receive())
    await asyncio.sleep(0)
    assert not reader.done()
    body.take(b"x")
    assert await reader == PART
    body.take_end()
    assert await body.receive() == END


async def test_all_who_wait_learn_that_the_client_has_gone():
    body = exchange(Socket())
    body.take_end()
    await body.receive()
    readers = [asyncio.create_task(body.receive()) for _ in range(2)]
    await asyncio.sleep(0.01)
    assert not any(reader.done() for reader in readers)
    body.disconnect()
    assert await asyncio.gather(*readers) == [{"type": "http.disconnect"}] * 2


async def test_what_came_of_a_late_body_is_told_first():
    late = exchange(Socket())
    late.take(b"x")
    late.give_up(LATE)
    assert await late.receive() == PART
    for _ in range(2):
        with pytest.raises(BodyTimeoutError, match="late"):
            await late.receive()
    assert not late.keep_alive


async def test_who_waits_for_a_late_body():
    late = exchange(Socket())
    reader = asyncio.create_task(late.receive())
    await asyncio.sleep(0.01)
    late.give_up(LATE)
    with pytest.raises(BodyTimeoutError):
        await reader
    assert reader.cancelling() == 0


async def test_behind_the_body_nothing_is_late():
    whole = exchange(Socket())
    whole.take_end()
    whole.give_up(LATE)
    assert await whole.receive() == END
    waiting = asyncio.create_task(whole.receive())
    await asyncio.sleep(0.01)
    assert not waiting.done()
    assert whole.keep_alive
    waiting.cancel()


async def test_late_and_cancelled_is_cancelled():
    late = exchange(Socket())
    reader = asyncio.create_task(late.receive())
    await asyncio.sleep(0.01)
    late.give_up(LATE)
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader


async def test_an_answer_ends_its_request():
    answer = exchange(Socket())
    reader = asyncio.create_task(answer.receive())
    await asyncio.sleep(0)
    await answer.send(START)
    await answer.send(piece(b"", more=False))
    assert await reader == {"type": "http.disconnect"}
