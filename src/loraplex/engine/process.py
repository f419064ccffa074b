"""An engine's own process: what it is told at its birth, and how it ends with serving."""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable
from io import RawIOBase
from pathlib import Path

import msgspec

from loraplex.engine.channel import EngineChannel, SocketChannel
from loraplex.engine.step_marker import open_marker_file

_LENGTH_BYTES = 4


class EngineStart(msgspec.Struct, frozen=True):
    """What an engine process reads from its standard input: 4 bytes of length, then msgpack.

    The pipe then stays open: its end tells the engine that serving is gone.
    """

    endpoint: str
    epoch: int
    settings: bytes
    marker_path: str = ""
    """A file for a StepMarker."""
    logits_dir: str = ""
    """A folder for logits that requests want back."""

    def to_bytes(self) -> bytes:
        body = msgspec.msgpack.encode(self)
        return len(body).to_bytes(_LENGTH_BYTES, "big") + body


def be_engine_process(run: Callable[[bytes, EngineChannel], None]) -> None:
    """Run an engine with the settings that serving gave, at most as long as serving lives."""
    # Whoever stops a whole group of processes means serving, which decides when the engine stops.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    # Unbuffered: a thread that waits in a buffered read would hold its lock at the exit.
    pipe = open(sys.stdin.fileno(), "rb", buffering=0, closefd=False)  # noqa: SIM115
    try:
        start = read_engine_start(pipe)
    except EOFError:
        return
    threading.Thread(target=_end_with_serving, args=(pipe,), daemon=True).start()
    marker = open_marker_file(Path(start.marker_path)) if start.marker_path else None
    logits_dir = Path(start.logits_dir) if start.logits_dir else None
    socket = SocketChannel(start.endpoint, start.epoch, marker, logits_dir)
    with contextlib.closing(socket) as channel:
        run(start.settings, channel)


def read_engine_start(pipe: RawIOBase) -> EngineStart:
    """From an unbuffered pipe. Raises EOFError if serving is gone."""
    length = int.from_bytes(_read_exactly(pipe, _LENGTH_BYTES), "big")
    return msgspec.msgpack.decode(_read_exactly(pipe, length), type=EngineStart)


def _read_exactly(pipe: RawIOBase, count: int) -> bytes:
    data = b""
    while len(data) < count:
        piece = pipe.read(count - len(data))
        if not piece:
            raise EOFError("serving ended before it had said what to start")
        data += piece
    return data


def _end_with_serving(pipe: RawIOBase) -> None:
    pipe.read()
    os._exit(0)
