"""Staging workers that outlive their pools: a later pool takes those that are left idle."""

import asyncio
import atexit
import contextlib
import os
import socket
import subprocess
from collections.abc import Iterator, Sequence
from unittest.mock import patch

from loraplex.adapters import staging
from loraplex.adapters.staged import StageReply
from loraplex.adapters.staging import ChildProcess
from loraplex.core.environment import child_environment
from loraplex.core.stopped_process import is_stopped

_MAX_KEPT = 12
_END_SECONDS = 10.0
_READ_BYTES = 65536

_Key = tuple[tuple[str, ...], str, frozenset[tuple[str, str]]]
"""Command, folder and environment: what a process cannot change after its start."""
_Kept = tuple[_Key, "subprocess.Popen[bytes]", socket.socket, socket.socket]
"""A process, and our ends of its data and of its errors."""

_kept: list[_Kept] = []
_reply = staging._reply


@contextlib.contextmanager
def keeping_staging_processes() -> Iterator[None]:
    """Let the pools of this process start and close workers as if they were new ones.

    A pool that closes leaves an idle worker as it is. One with a request ends, and so does one
    that is to end after its reply, as with `ChildProcess`.
    """
    with patch.multiple(staging, ChildProcess=_KeptProcess, _reply=_noting_reply):
        yield


class _KeptProcess(ChildProcess):
    has_request = False
    _key: _Key
    _is_left = False

    @classmethod
    async def start(cls, command: Sequence[str]) -> "_KeptProcess":
        environment = child_environment().items()
        static = frozenset(item for item in environment if item[0] != "PYTEST_CURRENT_TEST")
        key = tuple(command), os.getcwd(), static
        made = await cls._taken(key) or await super().start(command)
        assert isinstance(made, _KeptProcess)
        made._key = key
        return made

    @classmethod
    async def _taken(cls, key: _Key) -> "_KeptProcess | None":
        while kept := next((each for each in _kept if each[0] == key), None):
            _kept.remove(kept)
            _, process, *streams = kept
            if process.poll() is None and not is_stopped(process.pid):
                data, errors = [await asyncio.open_connection(sock=each) for each in streams]
                return cls(process, *data, *errors)
            _end(kept)
        return None

    @property
    def returncode(self) -> int | None:
        return 0 if self._is_left else super().returncode

    def end_input(self) -> None:
        """Leave the process to others, with nothing in its streams."""
        if self.has_request:
            super().end_input()
            return
        self._is_left = True
        self._unused.transport.pause_reading()  # type: ignore[attr-defined]
        with contextlib.suppress(BlockingIOError), _copy(self._unused) as errors:
            while data := errors.recv(_READ_BYTES, socket.MSG_DONTWAIT):
                self.stderr.feed_data(data)
        self.stderr.feed_eof()

    def close(self) -> None:
        if self._is_left:
            streams = _copy(self.stdin), _copy(self._unused)
            _kept.append((self._key, self._process, *streams))
        super().close()
        while len(_kept) > _MAX_KEPT:
            _end(_kept.pop(0))


async def _noting_reply(process: _KeptProcess, pieces: Sequence[memoryview]) -> StageReply:
    process.has_request = True
    reply = await _reply(process, pieces)
    process.has_request = False
    return reply


def _copy(stream: asyncio.StreamWriter) -> socket.socket:
    return socket.socket(fileno=os.dup(stream.get_extra_info("socket").fileno()))


def _end(kept: _Kept) -> None:
    _, process, *streams = kept
    for stream in streams:
        stream.close()
    try:
        process.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@atexit.register
def _end_all() -> None:
    while _kept:
        _end(_kept.pop())
