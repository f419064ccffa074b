"""The process that checks grammars, from within: its replies, its limits, and when it ends."""

import io
import os
import resource
import signal
from pathlib import Path

import msgspec
import pytest

from loraplex.core.errors import ErrorInfo, InternalError, InvalidParameterError
from loraplex.core.grammar import Grammar, GrammarKind, GrammarLimits
from loraplex.serving.grammar import check_worker
from loraplex.serving.grammar.check_messages import LENGTH, CheckReply, CheckSetup
from loraplex.serving.grammar.check_process import CheckProcess

SETUP = CheckSetup({0: b"</s>"}, 300, GrammarLimits())
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
    monkeypatch.setattr(check_worker, "_WORN_KIB", 1 << 40)


def message(value):
    body = msgspec.msgpack.encode(value)
    return LENGTH.pack(len(body)) + body


def replies_to(asked):
    written = io.BytesIO()
    check_worker.serve(io.BytesIO(asked), written)
    data, replies = written.getvalue(), []
    while data:
        (length,) = LENGTH.unpack_from(data)
        data, body = data[LENGTH.size + length :], data[LENGTH.size : LENGTH.size + length]
        replies.append(msgspec.msgpack.decode(body, type=CheckReply))
    return replies


def test_one_reply_for_each_grammar():
    first, second = replies_to(message(SETUP) + message(GOOD) + message(BAD))
    assert (bool(first.compiled), first.error, first.is_last) == (True, None, False)
    assert (second.compiled, second.is_last) == ("", False)
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
    monkeypatch.setattr(check_worker, "_WORN_KIB", 0)
    (reply,) = replies_to(message(SETUP) + message(GOOD) * 2)
    assert reply.is_last
    assert reply.compiled


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
def test_what_fails_is_said(raised, expected, words):
    class Check:
        def compiled(self, grammar):
            raise raised

    error = check_worker.answer(Check(), GOOD).error
    assert isinstance(error, ErrorInfo)
    assert error.code == expected.code
    assert words in error.message


def test_what_holds_in_the_process():
    before = signal.signal(signal.SIGPROF, signal.SIG_IGN)
    process = CheckProcess(SETUP)
    try:
        process.compiled(GOOD)
        pid = process._process.pid
        most = check_worker.MAX_BYTES
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
