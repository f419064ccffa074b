"""Both ends of a channel: in a thread, and over a socket."""

import threading
import time

import pytest
import zmq

from loraplex.engine.channel import EPOCH_BYTES, SocketChannel, ThreadChannel
from loraplex.engine.messages import (
    AbortRequest,
    ConfirmEvents,
    EngineEnded,
    EngineReady,
    PreloadAdapter,
    Shutdown,
    decode_event,
    encode,
)
from support.fake_runner import FAKE_CAPACITY

READY = EngineReady(FAKE_CAPACITY)


def epoch_frame(epoch: int) -> bytes:
    return epoch.to_bytes(EPOCH_BYTES, "big")


class SocketEnd:
    """What serving's end does, without asyncio."""

    def __init__(self, context: zmq.Context, endpoint: str) -> None:
        self.socket = context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(endpoint)
        self.identity = b""

    def receive(self) -> tuple[bytes, bytes]:
        assert self.socket.poll(60_000)
        self.identity, epoch, payload = self.socket.recv_multipart()
        return epoch, payload

    def put(self, command, epoch: int) -> None:
        self.socket.send_multipart([self.identity, epoch_frame(epoch), encode(command)])


@pytest.fixture
def ends(tmp_path_factory):
    endpoint = f"ipc://{tmp_path_factory.mktemp('s')}/s"  # a short path
    with zmq.Context() as context:
        end = SocketEnd(context, endpoint)
        channel = SocketChannel(endpoint, epoch=7)
        channel.send(READY)
        yield channel, end
        closing = threading.Thread(target=channel.close)
        closing.start()
        while closing.is_alive():
            if end.socket.poll(10) and decode_event(end.receive()[1]) == EngineEnded():
                end.put(ConfirmEvents(), 7)
        end.socket.close()


def test_a_thread_gets_commands_in_order():
    channel = ThreadChannel(lambda event: None)
    commands = [AbortRequest(1), PreloadAdapter("a"), Shutdown()]
    for command in commands:
        channel.put(command)
    assert [channel.receive(timeout) for timeout in (None, 0, 1.0)] == commands


@pytest.mark.parametrize("timeout", [0, -1.0, 0.02])
def test_a_thread_waits_no_longer_than_it_may(timeout):
    start = time.monotonic()
    assert ThreadChannel(lambda event: None).receive(timeout) is None
    assert time.monotonic() - start >= max(0, timeout)


def test_a_waiting_thread_is_woken():
    channel = ThreadChannel(lambda event: None)
    received = []
    thread = threading.Thread(target=lambda: received.append(channel.receive(None)))
    thread.start()
    channel.put(Shutdown())
    thread.join(60)
    assert received == [Shutdown()]


def test_a_thread_delivers_events():
    events = []
    ThreadChannel(events.append).send(READY)
    assert events == [READY]


def test_a_socket_carries_both_ways(ends):
    channel, end = ends
    epoch, payload = end.receive()
    assert (epoch, decode_event(payload)) == (epoch_frame(7), READY)
    end.put(AbortRequest(1), 7)
    end.put(Shutdown(), 7)
    assert channel.receive(5.0) == AbortRequest(1)
    assert channel.receive(None) == Shutdown()


def test_a_socket_drops_what_was_meant_for_another_engine(ends):
    channel, end = ends
    end.receive()
    end.put(Shutdown(), 6)
    end.put(Shutdown(), 8)
    end.put(PreloadAdapter("mine"), 7)
    assert channel.receive(5.0) == PreloadAdapter("mine")
    assert channel.receive(0) is None


def test_a_socket_rounds_its_timeout_up(ends):
    """A wait that is cut to 0 would make the loop spin."""
    channel, _ = ends
    start = time.monotonic()
    assert channel.receive(0.0001) is None
    assert time.monotonic() - start >= 0.0001
    assert channel.receive(0) is None
    assert channel.receive(-1.0) is None


def test_sending_never_waits_for_a_reader(ends):
    channel, end = ends
    for _ in range(5000):  # many times the usual high-water mark
        channel.send(READY)
    assert [decode_event(end.receive()[1]) for _ in range(5001)] == [READY] * 5001


def test_what_was_sent_is_delivered_after_close(ends):
    """More than the socket's own buffers hold, so that some is still in the channel.

    The engine's process lives until its reader has confirmed all: however long that takes.
    """
    channel, end = ends
    for _ in range(6000):
        channel.send(READY)
    closing = threading.Thread(target=channel.close)
    closing.start()
    received = [decode_event(end.receive()[1]) for _ in range(6002)]
    assert received == [READY] * 6001 + [EngineEnded()]
    end.put(Shutdown(), 7)  # came too late
    end.put(ConfirmEvents(), 6)  # is meant for another engine
    assert closing.is_alive()
    assert not end.socket.poll(0), "nothing follows"
    end.put(ConfirmEvents(), 7)
    closing.join()
    channel.close()  # closed already
