"""The process that checks grammars: what a client wrote may cost this one, and no other.

Reads from stdin and answers on stdout, in the messages of check_messages: a CheckSetup, then a
Grammar for each CheckReply. Nothing is pickled. A grammar has MAX_SECONDS of processor time, then
the system ends the process with SIGPROF; memory that is refused ends it, too. It ends when stdin
does. Run as python -m loraplex.serving.grammar.check_worker.
"""

import os
import resource
import signal
import sys
from pathlib import Path
from typing import BinaryIO, Final, TypeVar

import msgspec

from loraplex.core.errors import InvalidParameterError, LoraplexError
from loraplex.core.grammar import Grammar
from loraplex.serving.grammar.check import GrammarCheck, SpecialTokens
from loraplex.serving.grammar.check_messages import LENGTH, MAX_SECONDS, CheckReply, CheckSetup

MAX_BYTES: Final = 2 << 30
"""Of addresses; threads' stacks and the libraries take some hundred MiB of them."""
_WORN_KIB: Final = 256 << 10
"""Of memory that was in use at one time: some of it never comes back."""

T = TypeVar("T")


def serve(requests: BinaryIO, replies: BinaryIO) -> None:
    """Answer every grammar with one reply, until they end."""
    setup = _read(requests, CheckSetup)
    if setup is None:
        return
    check = GrammarCheck(SpecialTokens(setup.special_tokens, setup.vocab_size), setup.limits)
    while (grammar := _read(requests, Grammar)) is not None:
        reply = answer(check, grammar)
        body = msgspec.msgpack.encode(reply)
        replies.write(LENGTH.pack(len(body)) + body)
        replies.flush()
        if reply.is_last:
            return


def answer(check: GrammarCheck, grammar: Grammar) -> CheckReply:
    """In time, or never: then this process is no more."""
    signal.setitimer(signal.ITIMER_PROF, MAX_SECONDS)
    compiled, error = "", None
    try:
        compiled = check.compiled(grammar).text
    except LoraplexError as failed:
        error = failed.to_info()
    except (MemoryError, RecursionError) as failed:
        reason = f"the grammar cannot be compiled: {type(failed).__name__}"
        error = InvalidParameterError(reason, param="grammar").to_info()
    signal.setitimer(signal.ITIMER_PROF, 0)
    return CheckReply(compiled, error, _peak_kib() > _WORN_KIB)


def _peak_kib() -> int:
    """The most memory that was in use at one time.

    Not getrusage where the system tells it: that begins with the peak of the process that started
    this one, which may be a large server.
    """
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii")
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))


def _read(stream: BinaryIO, kind: type[T]) -> T | None:
    """None at the end."""
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (length,) = LENGTH.unpack(head)
    body = stream.read(length)
    return msgspec.msgpack.decode(body, type=kind) if len(body) == length else None


def main() -> None:
    """Keep the reply stream apart: whatever prints to stdout goes to stderr instead."""
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with replies:
        serve(sys.stdin.buffer, replies)


if __name__ == "__main__":
    main()
