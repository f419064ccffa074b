"""Serving's end of the line to an engine: in a thread, and in a process that can be killed."""

import asyncio
import contextlib
import os
import resource
import signal
import stat
import sys
import tempfile
from pathlib import Path

import pytest

from loraplex.core.errors import ConfigError, ErrorInfo
from loraplex.engine.messages import (
    AbortRequest,
    AdapterRejected,
    AddRequest,
    EngineFailed,
    EngineReady,
    StepDone,
)
from loraplex.serving.engines.engine_state import EngineEnd
from loraplex.serving.engines.link import EngineDied, ProcessLink, ThreadLink
from support.fake_engine_process import (
    FakeEngineSettings,
    fake_engine_process,
    fake_engine_thread,
)
from support.fake_runner import FAKE_CAPACITY
from support.naming import naming

LINKS = {"thread": fake_engine_thread, "process": fake_engine_process}

SCRIPT = """
import os, signal, time
from loraplex.core.errors import ErrorInfo
from loraplex.engine.messages import AdapterRejected, EngineReady
from loraplex.engine.process import be_engine_process
from support.fake_runner import FAKE_CAPACITY

def send(channel, digest):
    channel.send(AdapterRejected(digest, ErrorInfo("x", "y")))

def run(settings, channel):
    channel.send(EngineReady(FAKE_CAPACITY))
    channel.receive(None)
    {0}

be_engine_process(run)
"""
"""An engine that is ready, and after its first command does what a test wants."""


async def start_script(*lines: str) -> ProcessLink:
    script = SCRIPT.format("\n    ".join(lines))
    link = await ProcessLink.start([sys.executable, "-c", script], b"", 3)
    assert isinstance(await link.receive(), EngineReady)
    return link


async def rejections(link: ProcessLink) -> tuple[list[str], str]:
    """The digests that the engine said, and how it died."""
    digests = []
    try:
        while True:
            event = await link.receive()
            assert isinstance(event, AdapterRejected)
            digests.append(event.digest)
    except EngineDied as death:
        return digests, str(death)


async def test_an_engine_lives_until_its_last_event_is_read(temporary_folder):
    """More than the sockets' buffers hold, read only once the engine has sent everything."""
    done = temporary_folder / "done"
    link = await start_script(
        "for number in range(6000): send(channel, str(number))", f"open({str(done)!r}, 'w').close()"
    )
    link.send(AbortRequest(1))
    while not done.exists():
        await asyncio.sleep(0.001)
    assert not link._exited.done(), "it waits for its reader"
    digests, death = await rejections(link)
    assert digests == [str(number) for number in range(6000)]
    assert "ended with status 0" in death
    await link.close()
    done.unlink()


async def test_an_engine_that_is_closed_is_not_waited_for_with_unread_events(temporary_folder):
    """close() reads what is left, so that the engine can end by itself."""
    link = await start_script(
        "for number in range(6000): send(channel, str(number))", "channel.receive(None)"
    )
    link.send(AbortRequest(1))
    await link.receive()
    await link.close()
    assert link._exited.result() == 0


@pytest.fixture(params=LINKS)
def start(request, temporary_folder):
    return LINKS[request.param]


@pytest.fixture
async def engine(temporary_folder):
    """A ready fake engine in its own process."""
    link = await fake_engine_process()(1)
    assert await link.receive() == EngineReady(FAKE_CAPACITY)
    yield link
    await link.close()


async def outputs_of(link, request_id: int = 1) -> list:
    outputs = []
    while not (outputs and outputs[-1].finished):
        event = await link.receive()
        assert isinstance(event, StepDone)
        outputs += [o for o in event.outputs if o.request_id == request_id]
    return outputs


async def test_an_engine_serves_until_it_is_closed(start, make_request, capfd):
    link = await start()(1)
    assert await link.receive() == EngineReady(FAKE_CAPACITY)
    link.send(AddRequest(make_request()))
    outputs = await outputs_of(link)
    assert sum(len(delta.token_ids) for output in outputs for delta in output.deltas) == 3
    link.send(AbortRequest(5))
    await link.close()
    assert capfd.readouterr().err == ""


async def test_an_engine_says_why_it_cannot_start(start):
    error = ErrorInfo("invalid_config", "no weights here")
    link = await start(FakeEngineSettings(failure=error))(1)
    assert await link.receive() == EngineFailed(error)
    with pytest.raises(EngineDied):
        await link.receive()
    await link.close()


async def test_an_engine_that_says_nothing_has_died(start):
    link = await start(FakeEngineSettings(crash=True))(1)
    with pytest.raises(EngineDied):
        await link.receive()
    await link.close()


async def test_closing_an_engine_that_is_still_starting(start):
    link = await start(FakeEngineSettings(start_seconds=0.05))(1)
    await link.close()


async def test_shutdown_ends_a_process_with_status_0(engine):
    await engine.close()
    assert engine._exited.result() == 0


async def test_the_thread_of_an_engine_that_fails_is_logged(caplog):
    def run(channel):
        raise ZeroDivisionError

    link = ThreadLink(run)
    with pytest.raises(EngineDied, match=naming("thread")):
        await link.receive()
    await link.close()
    assert "ZeroDivisionError" in caplog.text


async def test_the_folder_of_the_socket_is_private(engine, temporary_folder):
    (folder,) = temporary_folder.iterdir()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    names = sorted(path.name for path in folder.iterdir())
    assert names == [".owner", "engine", "logits", "steps"]
    await engine.close()
    assert not folder.exists()


async def test_what_an_engine_said_before_its_end_is_heard(temporary_folder):
    link = await start_script(
        "for i in range(500): send(channel, str(i))",
        "channel.close()",  # only then all of it has been read
        "os.kill(os.getpid(), signal.SIGKILL)",
    )
    link.send(AbortRequest(1))
    digests, death = await rejections(link)
    assert digests == [str(i) for i in range(500)]
    assert death == (
        f"the engine process {link.pid} was killed by SIGKILL; a system short of memory does that, "
        "and logs it"
    )
    await link.close()


async def test_a_killed_engine_is_noticed_while_it_works(make_request, temporary_folder):
    link = await fake_engine_process(FakeEngineSettings(step_seconds=60))(1)
    assert isinstance(await link.receive(), EngineReady)
    link.send(AddRequest(make_request()))
    os.kill(link.pid, signal.SIGKILL)
    async with asyncio.timeout(60):
        with pytest.raises(EngineDied, match="SIGKILL"):
            await link.receive()
    with pytest.raises(EngineDied, match="SIGKILL"):
        await link.receive()
    link.send(AbortRequest(1))  # is lost, and does no harm
    await link.close()


async def test_the_exit_status_is_reported(temporary_folder):
    link = await start_script("os._exit(7)")
    link.send(AbortRequest(1))
    assert (await rejections(link))[1].endswith("ended with status 7")
    await link.close()


async def test_what_another_epoch_says_is_dropped(temporary_folder):
    link = await start_script(
        "mine = channel._epoch",
        "channel._epoch = bytes(8)",
        "send(channel, 'from the dead')",
        "channel._epoch = mine",
        "send(channel, 'mine')",
    )
    link.send(AbortRequest(1))
    assert (await rejections(link))[0] == ["mine"]
    await link.close()


async def test_an_engine_ends_when_servings_pipe_does(make_request, temporary_folder):
    """Even in a step that takes a minute."""
    link = await fake_engine_process(FakeEngineSettings(step_seconds=60))(1)
    await link.receive()
    link.send(AddRequest(make_request()))
    link._process.stdin.close()
    async with asyncio.timeout(60):
        assert await link._exited == 0
    await link.close()


async def test_an_engine_ends_with_a_serving_process_that_is_killed(tmp_path):
    serving = """
import asyncio
from support.fake_engine_process import fake_engine_process

async def main():
    link = await fake_engine_process()(1)
    await link.receive()
    print(link.pid, link._endpoint.address, flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        serving,
        stdout=asyncio.subprocess.PIPE,
        env=os.environ | {"TMPDIR": str(tmp_path)},
    )
    pid, address = (await process.stdout.readline()).decode().split()
    process.kill()
    await process.wait()
    async with asyncio.timeout(60):
        while is_alive(int(pid)):
            await asyncio.sleep(0.01)
    assert address.startswith(str(tmp_path))


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    status = Path(f"/proc/{pid}/stat")
    return not status.exists() or status.read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_only_serving_ends_an_engine(engine, make_request, number):
    """A Ctrl-C, or a supervisor's signal to the whole group, must not cut requests short."""
    assert os.getpgid(engine.pid) == engine.pid
    assert os.getsid(engine.pid) == os.getsid(0), "else Linux gives it as much time as all of us"
    os.kill(engine.pid, number)
    engine.send(AddRequest(make_request()))
    assert (await outputs_of(engine))[-1].error is None


async def test_a_step_that_never_ends_is_killed(make_request, temporary_folder, monkeypatch):
    monkeypatch.setattr("loraplex.serving.engines.link._STOP_SECONDS", 0.05)
    link = await fake_engine_process(FakeEngineSettings(step_seconds=60))(1)
    await link.receive()
    link.send(AddRequest(make_request()))
    await asyncio.sleep(0.05)
    await link.close()
    assert link._exited.result() == -signal.SIGKILL


async def test_a_hung_engine_is_killed_and_its_step_blamed(engine, make_request):
    engine.kill("hung: no progress")
    engine.kill("the first problem counts")
    with pytest.raises(EngineDied, match=naming("hung")) as death:
        await engine.receive()
    assert death.value.end is EngineEnd.HANG


async def test_a_process_that_does_not_end_is_given_up(temporary_folder, monkeypatch, caplog):
    """It waits for a driver: not even SIGKILL ends it."""
    monkeypatch.setattr("loraplex.serving.engines.link._KILL_SECONDS", 0.05)
    link = await fake_engine_process()(1)
    await link.receive()
    process = link._process
    monkeypatch.setattr(process, "kill", lambda: None)
    link.kill("hung")
    with pytest.raises(EngineDied, match="hung"):
        await link.receive()
    assert "does not end though it was killed" in caplog.text
    await link.close()
    os.kill(process.pid, signal.SIGKILL)
    await process.wait()


async def test_a_command_that_cannot_be_run(temporary_folder):
    with pytest.raises(FileNotFoundError):
        await ProcessLink.start(["/nowhere/python"], b"", 1)


async def test_no_place_for_the_socket(temporary_folder, monkeypatch):
    long = temporary_folder / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    with pytest.raises(ConfigError, match="TMPDIR"):
        await ProcessLink.start([sys.executable], b"", 1)
    long.rmdir()


async def test_too_few_open_files(temporary_folder):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 4, hard))
    try:
        with pytest.raises(OSError, match=naming("[Errno 24]")):
            await ProcessLink.start([sys.executable, "-c", ""], b"", 1)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert list(temporary_folder.iterdir()) == []


@pytest.fixture
def spawned(monkeypatch):
    """The processes that were spawned."""
    processes = []
    create = asyncio.create_subprocess_exec

    async def recording(*args, **kwargs):
        processes.append(await create(*args, **kwargs))
        return processes[-1]

    monkeypatch.setattr(asyncio, "create_subprocess_exec", recording)
    return processes


@pytest.mark.parametrize("num_turns", [0, 1, 2, 3, 5])
async def test_a_start_that_is_cancelled_leaves_nothing(temporary_folder, spawned, num_turns):
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    start = asyncio.create_task(ProcessLink.start(command, b"", 1))
    for _ in range(num_turns):
        await asyncio.sleep(0)
    start.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await (await start).close()  # it may have been faster
    assert all(process.returncode is not None for process in spawned)


async def test_a_start_that_is_cancelled_without_a_listener(temporary_folder, spawned):
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    more_than_a_pipe_holds = bytes(1 << 20)
    start = asyncio.create_task(ProcessLink.start(command, more_than_a_pipe_holds, 1))
    while not spawned:
        await asyncio.sleep(0.001)
    await asyncio.sleep(0.01)
    assert not start.done()
    start.cancel()
    with pytest.raises(asyncio.CancelledError):
        await start
    assert spawned[0].returncode == -signal.SIGKILL
