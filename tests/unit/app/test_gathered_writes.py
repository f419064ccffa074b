import asyncio

import pytest

from loraplex.app.http_guard import GatheredWrites
from support.skipping_loop import SkippingLoop


class Socket(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__()
        self.written: list[bytes] = []
        self.is_closed = self.is_aborted = False
        self.num_unread = 0

    def write(self, data) -> None:
        assert not self.is_closed
        self.written.append(bytes(data))

    def close(self) -> None:
        self.is_closed = True

    def is_closing(self) -> bool:
        return self.is_closed

    def abort(self) -> None:
        self.is_aborted = True

    def get_write_buffer_size(self) -> int:
        return self.num_unread


def _run_once(loop: SkippingLoop) -> None:
    loop.call_soon(loop.stop)
    loop.run_forever()


@pytest.fixture
def socket() -> Socket:
    return Socket()


@pytest.fixture
async def writes(socket) -> GatheredWrites:
    return GatheredWrites(socket, asyncio.get_running_loop(), 60.0, lambda: None)


async def test_one_write_a_turn(socket, writes):
    for piece in (b"a", b"b", b"c"):
        writes.write(piece)
    assert socket.written == []
    await asyncio.sleep(0)
    assert socket.written == [b"abc"]
    writes.write(b"d")
    await asyncio.sleep(0)
    assert socket.written == [b"abc", b"d"]


async def test_a_flush_does_not_wait_for_the_turn(socket, writes):
    writes.write(b"a")
    writes.flush()
    writes.flush()
    assert socket.written == [b"a"]
    await asyncio.sleep(0)
    assert socket.written == [b"a"]


async def test_much_does_not_wait(socket, writes):
    writes.write(b"a")
    writes.write(bytes(64 * 1024))
    assert socket.written == [b"a" + bytes(64 * 1024)]


async def test_a_close_sends_what_waits(socket, writes):
    writes.write(b"a")
    writes.close()
    assert (socket.written, socket.is_closed) == ([b"a"], True)


async def test_a_connection_that_others_closed(socket, writes):
    writes.write(b"a")
    socket.close()
    await asyncio.sleep(0)
    assert (socket.written, writes.is_closing()) == ([], True)


async def test_nothing_is_written_to_a_closed_connection(socket, writes):
    writes.write(b"a")
    socket.is_closed = True
    writes.flush()
    assert socket.written == []


def test_the_last_bytes_of_a_closed_connection_have_a_time_limit():
    loop = SkippingLoop()
    socket, events = Socket(), list[str]()
    writes = GatheredWrites(socket, loop, 60.0, lambda: events.append("unread"))
    socket.num_unread = 5
    writes.close()
    loop.skip(59)
    _run_once(loop)
    assert not socket.is_aborted
    loop.skip(2)
    _run_once(loop)
    assert (socket.is_aborted, events) == (True, ["unread"])
    loop.close()


def test_a_client_that_reads_in_time_keeps_its_connection():
    loop = SkippingLoop()
    socket = Socket()
    writes = GatheredWrites(socket, loop, 60.0, lambda: None)
    for _ in range(3):
        socket.num_unread = 5
        writes.paused()
        loop.skip(59)
        _run_once(loop)
        socket.num_unread = 0
        writes.resumed()
    loop.skip(61)
    _run_once(loop)
    assert not socket.is_aborted
    loop.close()
