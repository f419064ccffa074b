"""Both ends of a channel: in a thread, and over a socket."""

import select
import socket
import threading
import time

import pytest

from loraplex.engine.channel import (
    EPOCH_BYTES,
    FRAME_HEAD,
    FrameReader,
    SocketChannel,
    ThreadChannel,
)
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


def framed_message(epoch: bytes, message: bytes) -> bytes:
    return FRAME_HEAD.pack(len(message), epoch) + message


class SocketEnd:
    """What serving's end does, without asyncio."""

    def __init__(self, path: str) -> None:
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(path)
        self._listener.listen()
        self._reader = FrameReader()
        self._frames = []

    def accept(self) -> None:
        self._socket, _ = self._listener.accept()
        self._socket.settimeout(60)

    def poll(self, timeout_ms: int) -> bool:
        """Whether anything comes in time."""
        return bool(self._frames or select.select([self._socket], [], [], timeout_ms / 1000)[0])

    def receive(self) -> tuple[bytes, bytes]:
        while not self._frames:
            data = self._socket.recv(1 << 16)
            assert data, "the channel was closed"
            self._frames += self._reader.feed(data)
        return self._frames.pop(0)

    def put(self, command, epoch: int) -> None:
        self._socket.sendall(framed_message(epoch_frame(epoch), encode(command)))

    def put_bytes(self, data: bytes) -> None:
        self._socket.sendall(data)

    def close(self) -> None:
        self._socket.close()
        self._listener.close()


@pytest.fixture
def ends(tmp_path_factory):
    path = str(tmp_path_factory.mktemp("s") / "s")
    end = SocketEnd(path)
    channel = SocketChannel(path, epoch=7)
    end.accept()
    channel.send(READY)
    yield channel, end
    closing = threading.Thread(target=channel.close)
    closing.start()
    while closing.is_alive():
        if end.poll(10) and decode_event(end.receive()[1]) == EngineEnded():
            end.put(ConfirmEvents(), 7)
            closing.join()
    end.close()


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
    assert not end.poll(0), "nothing follows"
    end.put(ConfirmEvents(), 7)
    closing.join()
    channel.close()  # closed already


def test_frames_come_in_any_pieces():
    messages = [(epoch_frame(number), bytes(number * 40)) for number in range(5)]
    stream = b"".join(framed_message(*message) for message in messages)
    for size in (1, 7, 64, len(stream)):
        reader = FrameReader()
        pieces = [stream[at : at + size] for at in range(0, len(stream), size)]
        assert [frame for piece in pieces for frame in reader.feed(piece)] == messages


def test_a_command_in_pieces_is_waited_for(ends):
    channel, end = ends
    frame = framed_message(epoch_frame(7), encode(PreloadAdapter("mine")))
    end.put_bytes(frame[:9])
    assert channel.receive(0) is None
    end.put_bytes(frame[9:])
    assert channel.receive(None) == PreloadAdapter("mine")


def test_a_channel_without_serving_waits_for_the_end_of_its_process(tmp_path_factory):
    path = str(tmp_path_factory.mktemp("s") / "s")
    end = SocketEnd(path)
    channel = SocketChannel(path, epoch=7)
    end.accept()
    end.close()
    assert channel.receive(None) is None
    start = time.monotonic()
    assert channel.receive(0.02) is None
    assert time.monotonic() - start >= 0.02
    for _ in range(100):
        channel.send(READY)  # is lost
    channel._socket.close()
