"""Process of an engine: what it reads at its start, and how it ends with serving."""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable
from io import RawIOBase
from pathlib import Path
from typing import TypeVar

import msgspec

from loraplex.core.process_group import leave_group
from loraplex.engine.channel import EngineChannel, SocketChannel
from loraplex.engine.step_marker import open_marker_file

_LENGTH_BYTES = 4

_Start = TypeVar("_Start", bound=msgspec.Struct)


class EngineStart(msgspec.Struct, frozen=True):
    """Message that an engine process reads from standard input: 4 bytes of length, then msgpack.

    The pipe then stays open: its end means that serving is gone.
    """

    endpoint: str
    epoch: int
    settings: bytes
    marker_path: str = ""
    """File of a StepMarker."""
    logits_dir: str = ""
    """Folder for logits that requests return."""


def be_engine_process(run: Callable[[bytes, EngineChannel], None]) -> None:
    """Run an engine with the settings that serving gave, at most as long as serving lives."""
    leave_group()
    # Serving decides when an engine stops.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    pipe = open_start_pipe()
    try:
        start = read_framed(pipe, EngineStart)
    except EOFError:
        return
    threading.Thread(target=_end_with_serving, args=(pipe,), daemon=True).start()
    marker = open_marker_file(Path(start.marker_path)) if start.marker_path else None
    logits_dir = Path(start.logits_dir) if start.logits_dir else None
    socket = SocketChannel(start.endpoint, start.epoch, marker, logits_dir)
    with contextlib.closing(socket) as channel:
        run(start.settings, channel)


def open_start_pipe() -> RawIOBase:
    """Return standard input, unbuffered: a thread that waits in a buffered read would hold its lock
    at the exit."""
    return open(sys.stdin.fileno(), "rb", buffering=0, closefd=False)


def framed(start: msgspec.Struct) -> bytes:
    """Return what the starter of a process writes to its pipe."""
    body = msgspec.msgpack.encode(start)
    return len(body).to_bytes(_LENGTH_BYTES, "big") + body


def read_framed(pipe: RawIOBase, kind: type[_Start]) -> _Start:
    """Read the message from an unbuffered pipe. Raises EOFError if the starter is gone."""
    length = int.from_bytes(_read_exactly(pipe, _LENGTH_BYTES), "big")
    return msgspec.msgpack.decode(_read_exactly(pipe, length), type=kind)


def _read_exactly(pipe: RawIOBase, count: int) -> bytes:
    data = b""
    while len(data) < count:
        piece = pipe.read(count - len(data))
        if not piece:
            raise EOFError("its starter ended before it sent what to start")
        data += piece
    return data


def _end_with_serving(pipe: RawIOBase) -> None:
    pipe.read()
    os._exit(0)
