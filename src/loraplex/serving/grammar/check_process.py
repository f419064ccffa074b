"""The process that checks a model's grammars, as its client sees it: started when it is needed,
asked, replaced when a grammar was too much for it. This side does not load llguidance."""

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
import time
from typing import IO, Final

import msgspec

from loraplex.core.environment import child_environment
from loraplex.core.errors import InternalError, InvalidParameterError, error_from_info
from loraplex.core.grammar import Grammar, GrammarKind
from loraplex.serving.grammar.check_messages import LENGTH, MAX_SECONDS, CheckReply, CheckSetup

_COMMAND: Final = (sys.executable, "-m", "loraplex.serving.grammar.check_worker")
_WALL_SECONDS: Final = 30.0
"""For what takes MAX_SECONDS of a processor: a machine may have few to give."""
_EXIT_SECONDS: Final = 5.0
"""From the end of its output to the end of the process."""

Process = subprocess.Popen[bytes]


class CheckProcess:
    """Used by one thread at a time; close() may come from another."""

    def __init__(self, setup: CheckSetup, command: tuple[str, ...] = _COMMAND) -> None:
        self._setup = setup
        self._command = command
        self._process: Process | None = None
        self._lock = threading.Lock()
        self._in_use = threading.Lock()
        """Held from a grammar to its reply: nobody closes pipes that are read."""
        self._is_closed = False

    def compiled(self, grammar: Grammar) -> Grammar:
        """In llguidance's form, which the engine can match.

        Raises InvalidParameterError: it says what is wrong, or that the grammar takes more time
        or memory than one may.
        """
        with self._in_use:
            return self._compiled(grammar)

    def close(self) -> None:
        """End the process; what it is doing fails."""
        with self._lock:
            self._is_closed = True
            process = self._process
        if process is not None:
            process.kill()
            with self._in_use:
                _end(process, _EXIT_SECONDS)

    def _compiled(self, grammar: Grammar) -> Grammar:
        process = self._running()
        try:
            reply = _exchange(process, grammar)
        except TimeoutError:
            _end(process, 0.0)
            raise _too_large(_TOO_SLOW) from None
        except (OSError, EOFError):
            status = _end(process, _EXIT_SECONDS)
            if self._is_closed:
                raise InternalError("the server is closing") from None
            if status >= 0:  # not by a signal: it was not the grammar's doing
                message = f"the process that checks grammars ended with status {status}"
                raise InternalError(message) from None
            raise _too_large(_TOO_SLOW if status == -signal.SIGPROF else _TOO_BIG) from None
        if reply.is_last:
            _end(process, _EXIT_SECONDS)
        if reply.error is not None:
            raise error_from_info(reply.error)
        return Grammar(GrammarKind.LLGUIDANCE, reply.compiled)

    def _running(self) -> Process:
        with self._lock:
            if self._is_closed:
                raise InternalError("the server is closing")
            if self._process is None or self._process.poll() is not None:
                self._process = self._started()
            return self._process

    def _started(self) -> Process:
        try:
            process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=child_environment(),
                start_new_session=True,  # a Ctrl-C in the terminal is for serving alone
            )
        except OSError as error:
            raise InternalError(f"no process for grammars can be started: {error}") from error
        with contextlib.suppress(OSError):  # the first grammar finds that it died
            _write(process, self._setup)
        return process


_TOO_SLOW: Final = f"it takes more than {MAX_SECONDS:g} s to compile"
_TOO_BIG: Final = "it takes too much memory to compile"


def _too_large(reason: str) -> InvalidParameterError:
    return InvalidParameterError(f"the grammar is too large: {reason}", param="grammar")


def _exchange(process: Process, grammar: Grammar) -> CheckReply:
    """Raises EOFError or OSError if the process ends over it, TimeoutError if nothing comes."""
    assert process.stdout is not None
    _write(process, grammar)
    deadline = time.monotonic() + _WALL_SECONDS
    (length,) = LENGTH.unpack(_read(process.stdout, LENGTH.size, deadline))
    return msgspec.msgpack.decode(_read(process.stdout, length, deadline), type=CheckReply)


def _write(process: Process, message: CheckSetup | Grammar) -> None:
    assert process.stdin is not None
    body = msgspec.msgpack.encode(message)
    process.stdin.write(LENGTH.pack(len(body)) + body)
    process.stdin.flush()


def _read(stream: IO[bytes], size: int, deadline: float) -> bytes:
    poll = select.poll()  # not select: file numbers may be large
    poll.register(stream, select.POLLIN)
    data = bytearray()
    while len(data) < size:
        left = deadline - time.monotonic()
        if left <= 0 or not poll.poll(left * 1000):
            raise TimeoutError
        piece = os.read(stream.fileno(), size - len(data))
        if not piece:
            raise EOFError
        data += piece
    return bytes(data)


def _end(process: Process, grace_seconds: float) -> int:
    """Wait for its end, kill it after the grace, and reap it; its exit status."""
    try:
        status = process.wait(grace_seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        status = process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):  # what it did not read any more
                pipe.close()
    return status
