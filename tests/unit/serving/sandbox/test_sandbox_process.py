"""A sandbox process, here of grammars: its limits, the errors for them, and its replacement."""

import asyncio
import os
import resource
import select
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest

from loraplex.core.errors import (
    InternalError,
    InvalidParameterError,
    NotReadyError,
    UnsupportedFeatureError,
)
from loraplex.core.grammar import Grammar, GrammarKind, GrammarLimits
from loraplex.core.stopped_process import is_stopped
from loraplex.serving.grammar.grammar_worker import GrammarSetup
from loraplex.serving.grammar.grammars import GRAMMARS
from loraplex.serving.sandbox import process as sandbox_process
from loraplex.serving.sandbox.process import Sandbox, SandboxKind, SandboxProcess
from loraplex.serving.sandbox.worker import LENGTH, Reply
from support.cpu_seconds import cpu_seconds
from support.eventually import eventually
from support.hostile_grammars import hostile_grammars
from support.naming import refused
from support.wire_requests import of_tenant

SETUP = msgspec.msgpack.encode(GrammarSetup({0: b"</s>"}, 300, GrammarLimits()))
GOOD = Grammar(GrammarKind.REGEX, "a+")
HOSTILE = hostile_grammars()
SLOW = HOSTILE["multiple-of"]
MAX_CPU_SECONDS = 2.0
"""Processor time of a grammar and of its reply; the grammar's own limit is half a second. Wall time
is whatever the machine has left."""
MAX_MIB = 400


class Grammars(SandboxProcess):
    """A process that compiles grammars, or one that runs `command` instead."""

    def __init__(self, *command: str, setup: bytes = SETUP) -> None:
        kind = GRAMMARS
        if command:
            fields = {name: getattr(kind, name) for name in kind.__struct_fields__}
            kind = type("Kind", (SandboxKind,), {"command": command}, frozen=True)(**fields)
        super().__init__(kind, lambda: setup)

    def compiled(self, grammar: Grammar) -> str:
        return self.run(msgspec.msgpack.encode(grammar)).decode()


@pytest.fixture(scope="module")
def process():
    made = Grammars()
    yield made
    made.close()


def message(reply: Reply) -> bytes:
    return framed(msgspec.msgpack.encode(reply))


def framed(body: bytes) -> bytes:
    return LENGTH.pack(len(body)) + body


READY = message(Reply())
"""Reply to the setup."""
DONE = message(Reply(b"{}", is_last=True))
TASK = framed(msgspec.msgpack.encode(GOOD))
IS_READY = f"import os, sys; sys.stdin.buffer.read({len(framed(SETUP))}); os.write(1, {READY!r});"
"""First statements of a process that reads what it is sent: one that ended before could not be
written to."""


def resident_mib(pid: int) -> float:
    with open(f"/proc/{pid}/statm") as numbers:
        return int(numbers.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def seconds_used(pid: int) -> float:
    """Return the processor time of a process, of this one, and of its children that ended."""
    ours, ended = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    used = ours.ru_utime + ours.ru_stime + ended.ru_utime + ended.ru_stime
    return used + cpu_seconds(pid)


@pytest.mark.some(15)
@pytest.mark.parametrize("name", HOSTILE)
def test_every_hostile_grammar_has_a_reply_in_time(process, name):
    process.compiled(GOOD)  # it may have to start again
    before = resident_mib(os.getpid())
    pid, error = process._process.pid, None
    start = seconds_used(pid)
    try:
        assert process.compiled(HOSTILE[name])
    except (InvalidParameterError, UnsupportedFeatureError) as refused:
        error = refused
    assert error is None or (error.param == "grammar" and len(error.message) < 1000)
    assert seconds_used(pid) - start < MAX_CPU_SECONDS
    process.compiled(GOOD)
    assert resident_mib(process._process.pid) < MAX_MIB
    assert resident_mib(os.getpid()) - before < 50


@pytest.mark.parametrize("name", ["multiple-of", "multiples-of", "regex-optional"])
def test_what_takes_too_long_is_said(process, name):
    with refused(InvalidParameterError, "grammar", 0.5, param="grammar"):
        process.compiled(HOSTILE[name])


def test_others_go_on_meanwhile(tmp_path):
    """Their threads have the interpreter: the process replies when another thread lets it."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    program = (
        f"{IS_READY} open({str(fifo)!r}).read();"
        f"os.write(1, {DONE!r}); sys.stdin.buffer.read({len(TASK)})"
    )
    waiting = Grammars(sys.executable, "-c", program)
    # Opening a pipe for writing waits for its reader, which comes when the task is being awaited.
    letting = threading.Thread(target=lambda: fifo.write_text("go on"))
    letting.start()
    assert waiting.compiled(GOOD) == "{}"
    letting.join()
    waiting.close()


def test_memory_that_is_refused_ends_the_process_and_is_said():
    program = "import os, sys; sys.stdin.buffer.read(50); os.abort()"
    dying = Grammars(sys.executable, "-c", program)
    with refused(InvalidParameterError, "grammar", "memory", param="grammar"):
        dying.compiled(GOOD)
    dying.close()


def test_a_killed_process_is_replaced_and_the_task_repeated(tmp_path, caplog):
    marker = tmp_path / "killed"
    program = (
        f"{IS_READY} import pathlib, signal; marker = pathlib.Path({str(marker)!r});"
        "marker.exists() or (marker.touch(), os.kill(os.getpid(), signal.SIGKILL));"
        f"sys.stdin.buffer.read({len(TASK)}); os.write(1, {DONE!r})"
    )
    killed_once = Grammars(sys.executable, "-c", program)
    assert killed_once.compiled(GOOD) == "{}"
    assert "the process for grammars was killed" in caplog.text
    killed_once.close()


def test_a_task_whose_processes_are_killed_takes_too_much_memory():
    program = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    killed = Grammars(sys.executable, "-c", program)
    with refused(InvalidParameterError, "grammar", "memory", param="grammar"):
        killed.compiled(GOOD)
    killed.close()


@pytest.mark.parametrize("status", [0, 1])
def test_one_that_ends_by_itself_is_our_fault(status):
    ending = Grammars(sys.executable, "-c", f"raise SystemExit({status})")
    with refused(InternalError, "grammars", status):
        ending.compiled(GOOD)
    ending.close()


def test_one_that_does_not_even_read_is_our_fault():
    """The setup is more than a pipe holds."""
    ending = Grammars(sys.executable, "-c", "raise SystemExit(3)", setup=b"x" * (1 << 20))
    with refused(InternalError, "grammars", 3):
        ending.compiled(GOOD)
    ending.close()


def test_the_last_reply_of_a_process_is_waited_out(monkeypatch):
    monkeypatch.setattr(sandbox_process, "_EXIT_SECONDS", 0.1)
    program = (
        "import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        f"os.write(1, {READY + DONE!r}); time.sleep(60)"
    )
    ending = Grammars(sys.executable, "-c", program)
    assert ending.compiled(GOOD) == "{}"
    first = ending._process
    assert first.returncode == -signal.SIGKILL
    assert first.stdin.closed
    assert first.stdout.closed
    assert ending.compiled(GOOD) == "{}"
    assert ending._process is not first


def test_a_terminals_signals_are_for_serving_alone(process):
    process.compiled(GOOD)
    pid = process._process.pid
    assert os.getpgid(pid) == pid
    assert os.getsid(pid) == os.getsid(0), "else Linux gives it as much time as all of us"
    own = os.getpriority(os.PRIO_PROCESS, 0)
    assert os.getpriority(os.PRIO_PROCESS, pid) > min(own, 18), "no niceness is above 19"


def test_one_that_never_replies_is_ended(monkeypatch):
    monkeypatch.setattr(sandbox_process, "_WALL_SECONDS", 0.2)
    silent = Grammars(sys.executable, "-c", "import time; time.sleep(60)")
    with refused(InvalidParameterError, "grammar", 0.5, param="grammar"):
        silent.compiled(GOOD)
    assert silent._process.returncode is not None
    silent.close()


def stop(process: SandboxProcess) -> int:
    """Stop the running process, and return its number."""
    pid = process._process.pid
    os.kill(pid, signal.SIGSTOP)
    assert eventually(lambda: is_stopped(pid))
    return pid


STOPS_ITSELF = "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)"


@pytest.mark.skipif(sys.platform != "linux", reason="finds stopped processes in /proc")
class TestStopped:
    def test_a_stopped_process_is_replaced_and_the_task_repeated(self, process, caplog):
        expected = process.compiled(GOOD)
        stopped = stop(process)
        assert process.compiled(GOOD) == expected
        assert process._process.pid != stopped
        assert not os.path.exists(f"/proc/{stopped}")
        assert "the process for grammars was stopped: it is killed" in caplog.text

    def test_a_task_larger_than_the_pipe_does_not_block(self):
        """The process reads nothing: neither does the write return."""
        stopping = Grammars(sys.executable, "-c", STOPS_ITSELF)
        with pytest.raises(NotReadyError):
            stopping.compiled(Grammar(GrammarKind.REGEX, "(" * (1 << 20)))
        stopping.close()

    def test_no_task_waits_for_an_idle_process_that_is_stopped(self, process, monkeypatch):
        """It is replaced without a look at a process that has the task."""
        monkeypatch.setattr(sandbox_process, "LOOK_SECONDS", 600.0)
        process.compiled(GOOD)
        stopped = stop(process)
        assert process.compiled(GOOD)
        assert process._process.pid != stopped

    def test_processes_that_are_stopped_again_are_a_retryable_error(self):
        stopping = Grammars(sys.executable, "-c", STOPS_ITSELF)
        with refused(NotReadyError, "signal") as error:
            stopping.compiled(GOOD)
        assert error.value.retry_after_seconds == 1
        assert stopping._process.returncode == -signal.SIGKILL
        stopping.close()


def test_a_program_that_is_not_there_is_our_fault():
    with refused(InternalError, "grammars", "'/nonexistent/program'"):
        Grammars("/nonexistent/program").compiled(GOOD)


def test_closing_ends_what_is_being_compiled():
    process = Grammars()
    process.compiled(GOOD)
    closing = threading.Timer(0.1, process.close)
    closing.start()
    with refused(InternalError, "closing"):
        process.compiled(SLOW)
    assert process._process.returncode == -signal.SIGKILL
    with refused(InternalError, "closing"):
        process.compiled(GOOD)
    closing.join()


def test_closing_leaves_the_pipes_to_their_readers(monkeypatch):
    """Else another file could have their numbers by then."""
    silent = Grammars(sys.executable, "-c", "import time; time.sleep(60)")
    closing = threading.Thread(target=silent.close)
    wait = sandbox_process._await

    def late(stream, event, *limits):
        if event == select.POLLIN:
            closing.start()
            closing.join(0.1)
        return wait(stream, event, *limits)

    monkeypatch.setattr(sandbox_process, "_await", late)
    with pytest.raises(InternalError, match="is closing"):
        silent.compiled(GOOD)
    closing.join()
    assert silent._process.returncode == -signal.SIGKILL


async def test_a_task_does_not_wait_for_those_of_another_tenant():
    """Nor for the start of a process: one is started after that of the first task, and anew."""
    sandbox = Sandbox(GRAMMARS, lambda: SETUP)
    slow = msgspec.msgpack.encode(SLOW)
    try:
        with of_tenant("hostile"):
            hostile = [asyncio.ensure_future(sandbox.run(slow)) for _ in range(4)]
        while not all(process.is_running for process in sandbox._processes):
            await asyncio.sleep(0.001)
        with of_tenant("quiet"):
            for _ in range(10):
                assert await sandbox.run(msgspec.msgpack.encode(GOOD))
        assert not hostile[-1].done()
        with of_tenant("hostile"):
            assert await asyncio.gather(*hostile, return_exceptions=True)
        assert all(process.is_running for process in sandbox._processes)
        assert [str(each.exception()) for each in hostile] == [GRAMMARS.too_slow] * 4
    finally:
        sandbox.close()
    with pytest.raises((InternalError, RuntimeError)):
        await sandbox.run(slow)


async def test_a_process_that_a_task_ended_takes_the_next_one_when_it_is_ready():
    """Another tenant's task does not wait until it has imported what it needs."""
    sandbox = Sandbox(GRAMMARS, lambda: SETUP)
    try:
        with refused(InvalidParameterError, 0.5, param="grammar"):
            await sandbox.run(msgspec.msgpack.encode(SLOW))
        assert [each.is_running for each in sandbox._idle] == [True, True]
        assert sandbox._idle[-1]._unsent is None, "it has the setup, and has replied to it"
    finally:
        sandbox.close()


def test_two_threads_never_choose_one_process(monkeypatch):
    sandbox = Sandbox(GRAMMARS, lambda: SETUP)

    def look(process: SandboxProcess) -> bool:
        time.sleep(0.0001)  # the other thread chooses meanwhile
        return False

    def run(process: SandboxProcess, task: bytes) -> bytes:
        time.sleep(0.001)
        return task

    monkeypatch.setattr(SandboxProcess, "run", run)
    monkeypatch.setattr(SandboxProcess, "prepare", lambda process: None)
    monkeypatch.setattr(SandboxProcess, "make_ready", lambda process: None)
    monkeypatch.setattr(SandboxProcess, "is_running", property(look))
    with ThreadPoolExecutor(2) as threads:
        assert all(threads.map(sandbox._run, [b"task"] * 300))
    assert sorted(map(id, sandbox._idle)) == sorted(map(id, sandbox._processes))


def test_it_is_let_go_when_a_grammar_took_much_memory(process):
    process.compiled(GOOD)
    before = process._process
    for index in range(200):
        process.compiled(Grammar(GrammarKind.REGEX, f"(a|b)*a(a|b){{{index % 14}}}{index}"))
    assert process._process is before
    assert resident_mib(before.pid) < MAX_MIB / 2


def test_a_large_server_keeps_its_process():
    """The system counts the peak of who starts a process as that process's own."""
    large = bytearray(b"1") * (300 << 20)
    made = Grammars()
    try:
        made.compiled(GOOD)
        first = made._process
        made.compiled(GOOD)
        assert made._process is first
    finally:
        made.close()
        del large
