"""Stopped processes, which neither work nor end."""

import asyncio
import os
import signal
import subprocess
import sys

import pytest

from loraplex.core import stopped_process
from loraplex.core.stopped_process import ProcessStopped, StopWatch, is_stopped, while_running

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="finds stopped processes in /proc")


@pytest.fixture
def sleeper():
    process = subprocess.Popen(["sleep", "60"])
    yield process.pid
    process.kill()
    process.wait()


def stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    os.waitid(os.P_PID, pid, os.WSTOPPED)


def test_a_stopped_process(sleeper):
    assert not is_stopped(sleeper)
    stop(sleeper)
    assert is_stopped(sleeper)
    os.kill(sleeper, signal.SIGCONT)
    os.waitid(os.P_PID, sleeper, os.WCONTINUED)
    assert not is_stopped(sleeper)


def test_a_process_that_is_gone_is_not_stopped():
    process = subprocess.Popen(["true"])
    process.wait()
    assert not is_stopped(process.pid)


def test_a_short_stop_is_ignored(sleeper, monkeypatch):
    states = iter([True, False, True, True])
    monkeypatch.setattr(stopped_process, "is_stopped", lambda pid: next(states))
    watch = StopWatch(sleeper)
    watch.look()
    watch.look()
    watch.look()
    with pytest.raises(ProcessStopped):
        watch.look()


async def test_work_of_a_stopped_process_is_cancelled(sleeper, monkeypatch):
    monkeypatch.setattr(stopped_process, "LOOK_SECONDS", 0.01)
    stop(sleeper)
    never = asyncio.Event()
    cancelled = []

    async def work() -> None:
        try:
            await never.wait()
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    with pytest.raises(ProcessStopped):
        await while_running(sleeper, work())
    assert cancelled == [True]


async def test_results_and_errors_pass(sleeper):
    async def works(result: str) -> str:
        if not result:
            raise EOFError
        return result

    assert await while_running(sleeper, works("done")) == "done"
    with pytest.raises(EOFError):
        await while_running(sleeper, works(""))
