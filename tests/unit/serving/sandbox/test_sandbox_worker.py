"""Main loop of a sandbox process, here of grammars: its replies, its limits, and when it ends."""

import io
import os
import resource
import signal
from pathlib import Path

import msgspec
import pytest

from loraplex.core.errors import ErrorInfo, InternalError, InvalidParameterError
from loraplex.core.grammar import Grammar, GrammarKind, GrammarLimits
from loraplex.serving.grammar import check
from loraplex.serving.grammar.grammar_worker import GrammarSetup, make_task
from loraplex.serving.grammar.grammars import GRAMMARS
from loraplex.serving.sandbox import worker
from loraplex.serving.sandbox.process import SandboxProcess
from loraplex.serving.sandbox.worker import LENGTH, Reply

SETUP = GrammarSetup({0: b"</s>"}, 300, GrammarLimits())
GOOD = Grammar(GrammarKind.REGEX, "a+")
BAD = Grammar(GrammarKind.REGEX, "(")


@pytest.fixture(autouse=True)
def timers(monkeypatch):
    """What was set; nothing ends the tests."""
    calls = []
    monkeypatch.setattr(signal, "setitimer", lambda *args: calls.append(args))
    return calls


@pytest.fixture(autouse=True)
def memory(monkeypatch):
    monkeypatch.setattr(worker, "_WORN_KIB", 1 << 40)


def message(value):
    body = msgspec.msgpack.encode(value)
    return LENGTH.pack(len(body)) + body


def replies_to(bytes_in):
    """Replies after that to the setup."""
    written = io.BytesIO()
    worker.serve(io.BytesIO(bytes_in), written, make_task, 0.5)
    data, replies = written.getvalue(), []
    while data:
        (length,) = LENGTH.unpack_from(data)
        data, body = data[LENGTH.size + length :], data[LENGTH.size : LENGTH.size + length]
        replies.append(msgspec.msgpack.decode(body, type=Reply))
    assert replies[:1] in ([], [Reply()])
    return replies[1:]


def test_one_reply_for_each_grammar():
    first, second = replies_to(message(SETUP) + message(GOOD) + message(BAD))
    assert (bool(first.result), first.error, first.is_last) == (True, None, False)
    assert (second.result, second.is_last) == (b"", False)
    assert second.error is not None


def test_grammars_may_name_the_models_special_tokens_and_no_others():
    one, other = (Grammar(GrammarKind.LARK, f'start: "a" <{name}>') for name in ("/s", "/t"))
    right, wrong = replies_to(message(SETUP) + message(one) + message(other))
    assert right.error is None
    assert wrong.error is not None


@pytest.mark.parametrize("cut", [0, 2, 10])
def test_what_is_not_whole_has_no_reply(cut):
    assert replies_to(message(SETUP)[:cut]) == []
    assert replies_to(message(SETUP) + message(GOOD)[:cut]) == []


def test_after_much_memory_a_reply_is_the_last(monkeypatch):
    monkeypatch.setattr(worker, "_WORN_KIB", 0)
    (reply,) = replies_to(message(SETUP) + message(GOOD) * 2)
    assert reply.is_last
    assert reply.result


def test_each_grammar_has_half_a_second(timers):
    replies_to(message(SETUP) + message(GOOD) + message(BAD))
    assert timers == [(signal.ITIMER_PROF, 0.5), (signal.ITIMER_PROF, 0)] * 2


@pytest.mark.parametrize(
    ("raised", "expected", "words"),
    [
        (MemoryError(), InvalidParameterError, "cannot be compiled: MemoryError"),
        (RecursionError(), InvalidParameterError, "cannot be compiled: RecursionError"),
        (InternalError("no"), InternalError, "no"),
    ],
    ids=["memory", "recursion", "ours"],
)
def test_what_fails_is_said(raised, expected, words, monkeypatch):
    def fail(self, grammar):
        raise raised

    monkeypatch.setattr(check.GrammarCheck, "compiled", fail)
    (reply,) = replies_to(message(SETUP) + message(GOOD))
    assert isinstance(reply.error, ErrorInfo)
    assert reply.error.code == expected.code
    assert words in reply.error.message


def test_what_holds_in_the_process():
    before = signal.signal(signal.SIGPROF, signal.SIG_IGN)
    process = SandboxProcess(GRAMMARS, lambda: msgspec.msgpack.encode(SETUP))
    try:
        process.run(msgspec.msgpack.encode(GOOD))
        pid = process._process.pid
        most = GRAMMARS.max_bytes
        assert resource.prlimit(pid, resource.RLIMIT_AS) == (most, most)
        assert resource.prlimit(pid, resource.RLIMIT_CORE) == (0, 0)
        files = Path(f"/proc/{pid}/fd")
        assert os.readlink(files / "1") == os.readlink(files / "2"), "prints are no replies"
        status = Path(f"/proc/{pid}/status").read_text()
        ignored = next(line for line in status.splitlines() if line.startswith("SigIgn"))
        assert not int(ignored.split()[1], 16) >> (signal.SIGPROF - 1) & 1
    finally:
        process.close()
        signal.signal(signal.SIGPROF, before)
