"""How an answer's bytes leave; what they are is in test_http_protocol.py."""

import asyncio
import logging
from types import SimpleNamespace

from loraplex.app.gathered_writes import GatheredWrites
from loraplex.app.http_exchange import Exchange

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
    logger = logging.getLogger("test")
    return Exchange(
        scope={"type": "http", "method": "GET", "http_version": "1.1", "path": "/"},
        transport=GatheredWrites(socket, asyncio.get_running_loop()),
        flow=SimpleNamespace(write_paused=False),
        logger=logger,
        access_logger=logger,
        access_log=False,
        default_headers=[],
        message_event=asyncio.Event(),
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
