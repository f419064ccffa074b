"""Main loop of a sandbox process: run one task at a time within limits of time and memory.

The process reads from stdin and replies on stdout. Each message is its length and its bytes: first
the setup, then one task after the other. Each has a `Reply`. Nothing is pickled. A task that takes
more than its processor time is ended by the system, which kills the whole process with SIGPROF, so
that neither native code nor a caught exception can escape it. Memory that is refused ends the task
or the process. The process ends when stdin does.
"""

import os
import resource
import signal
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, Final

import msgspec

from loraplex.core.errors import ErrorInfo, LoraplexError
from loraplex.core.process_group import leave_group, let_others_go_first

LENGTH: Final = struct.Struct("<I")
"""Length of the message that follows."""
_WORN_KIB: Final = 256 << 10
"""Peak of resident memory after which the process ends: Python and the allocator return only a
part of it to the system."""

Task = Callable[[bytes], bytes]


class Reply(msgspec.Struct, frozen=True, omit_defaults=True):
    """Result of one task, or the error that it raised."""

    result: bytes = b""
    error: ErrorInfo | None = None
    is_last: bool = False
    """The process ends: the next task needs a new one."""


def main(make_task: Callable[[bytes], Task]) -> None:
    """Serve tasks until stdin ends; argv has the limits in seconds and in bytes of addresses.

    `make_task` is called with the setup. Whatever prints to stdout goes to stderr instead.
    """
    max_seconds, max_bytes = float(sys.argv[1]), int(sys.argv[2])
    leave_group()
    let_others_go_first()
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_AS, (max_bytes, max_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with replies:
        serve(sys.stdin.buffer, replies, make_task, max_seconds)


def serve(
    requests: BinaryIO,
    replies: BinaryIO,
    make_task: Callable[[bytes], Task],
    max_seconds: float,
) -> None:
    """Reply to every task until the requests end."""
    setup = _read(requests)
    if setup is None:
        return
    task = make_task(setup)
    reply = Reply()
    while True:
        body = msgspec.msgpack.encode(reply)
        replies.write(LENGTH.pack(len(body)) + body)
        replies.flush()
        if reply.is_last or (request := _read(requests)) is None:
            return
        reply = run(task, request, max_seconds)


def run(task: Task, request: bytes, max_seconds: float) -> Reply:
    """Return the reply of one task; the process dies here if the task takes too long."""
    signal.setitimer(signal.ITIMER_PROF, max_seconds)
    result, error = b"", None
    try:
        result = task(request)
    except LoraplexError as failed:
        error = failed.to_info()
    signal.setitimer(signal.ITIMER_PROF, 0)
    return Reply(result, error, _peak_kib() > _WORN_KIB)


def _peak_kib() -> int:
    """Return the peak of resident memory.

    getrusage is only the fallback: its peak begins with that of the process that started this one,
    which may be a large server.
    """
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii")
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))


def _read(stream: BinaryIO) -> bytes | None:
    """Return the next message, or None at the end."""
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (length,) = LENGTH.unpack(head)
    body = stream.read(length)
    return body if len(body) == length else None
