"""The client with the real worker, and with workers that misbehave."""

import asyncio
import functools
import gc
import logging
import os
import re
import signal
import sys
from pathlib import Path

import msgspec
import pytest
import uvloop

from loraplex.adapters.staging import RequestTensor, StagingWorker
from loraplex.core import stopped_process
from loraplex.core.errors import (
    AdapterLoadError,
    AdapterMismatchError,
    AdapterTooLargeError,
    InvalidAdapterError,
)
from loraplex.core.rank_limits import RankLimits
from loraplex.core.stopped_process import is_stopped
from support.echo_service import staged_adapter
from support.eventually import eventually
from support.naming import naming


@pytest.fixture
async def worker(tmp_path):
    made = StagingWorker(tmp_path / "state")
    yield made
    await made.close()


def process_of(worker):
    (one,) = worker._local.processes
    return one.process


def python(code: str) -> tuple[str, ...]:
    return (sys.executable, "-c", code)


class NoFork(uvloop.Loop):
    async def subprocess_exec(self, *arguments, **options):
        raise AssertionError("it copies the address space on the event loop")


def test_no_start_copies_the_address_space(tmp_path):
    async def start_and_end() -> None:
        worker = StagingWorker(tmp_path, command=("cat",))
        await worker.start()
        process = process_of(worker)
        assert process.returncode is None
        await worker.close()
        assert process.returncode == 0

    num_files = []
    for _ in range(2):  # uvloop keeps what its first loop opens
        with asyncio.Runner(loop_factory=NoFork) as runner:
            runner.run(start_and_end())
        gc.collect()
        num_files.append(len(os.listdir("/proc/self/fd")))
    assert num_files[1] <= num_files[0]


class TestTheRealWorker:
    async def test_starts_before_it_is_needed(self, worker, peft_folder, shapes):
        await worker.start()
        process = process_of(worker)
        assert process.returncode is None
        await worker.start()
        folder = peft_folder("a", seed=0).write()
        await worker.stage(str(folder), shapes=shapes, max_ranks=RankLimits(8))
        assert process_of(worker) is process

    async def test_knows_no_keys(self, worker, monkeypatch):
        monkeypatch.setenv("LORAPLEX_API_KEYS", "secret")
        await worker.start()
        environ = Path(f"/proc/{process_of(worker).pid}/environ")
        # The system closes the pipe by which the start is noticed before it sets the environment.
        assert eventually(lambda: b"PATH=" in environ.read_bytes())
        environ = environ.read_bytes()
        assert b"LORAPLEX_" not in environ

    async def test_stages_one_after_another_in_one_process(self, tmp_path, peft_folder, shapes):
        worker = StagingWorker(tmp_path / "state", num_workers=1)
        folders = [peft_folder(f"a{seed}", seed=seed).write() for seed in range(3)]
        staged = await asyncio.gather(
            *(
                worker.stage(str(folder), shapes=shapes, max_ranks=RankLimits(8))
                for folder in folders
            )
        )
        assert len({one.source.digest for one in staged}) == 3
        process = process_of(worker)
        again = await worker.stage(str(folders[0]), shapes=shapes, max_ranks=RankLimits(8))
        assert again.was_known
        assert again.source == staged[0].source
        assert process_of(worker) is process
        await worker.close()

    async def test_errors_come_back_as_themselves(self, worker, peft_folder, shapes, tmp_path):
        folder = str(peft_folder(rank=4).write())
        with pytest.raises(InvalidAdapterError, match="Unicode"):
            await worker.stage("\ud800", shapes=shapes, max_ranks=RankLimits(8))
        with pytest.raises(InvalidAdapterError, match=naming("none")):
            await worker.stage(str(tmp_path / "none"), shapes=shapes, max_ranks=RankLimits(8))
        with pytest.raises(AdapterTooLargeError, match="max_lora_rank"):
            await worker.stage(folder, shapes=shapes, max_ranks=RankLimits(2))
        smaller = type(shapes)(1, shapes.modules)
        with pytest.raises(AdapterMismatchError, match="1 layers"):
            await worker.stage(folder, shapes=smaller, max_ranks=RankLimits(8))
        assert await worker.stage(folder, shapes=shapes, max_ranks=RankLimits(8))

    async def test_a_killed_worker_is_replaced(self, worker, peft_folder, shapes):
        folder = str(peft_folder().write())
        await worker.stage(folder, shapes=shapes, max_ranks=RankLimits(8))
        process_of(worker).kill()
        await process_of(worker).wait()
        assert (await worker.stage(folder, shapes=shapes, max_ranks=RankLimits(8))).was_known

    @pytest.mark.skipif(sys.platform != "linux", reason="finds stopped processes in /proc")
    async def test_a_stopped_worker_is_replaced(self, worker, peft_folder, shapes, caplog):
        folder = str(peft_folder().write())
        staged = await worker.stage(folder, shapes=shapes, max_ranks=RankLimits(8))
        stopped = process_of(worker)
        os.kill(stopped.pid, signal.SIGSTOP)
        again = await worker.stage(folder, shapes=shapes, max_ranks=RankLimits(8))
        assert again.source == staged.source
        assert await stopped.wait() == -signal.SIGKILL
        assert "was stopped by a signal, and is killed" in caplog.text

    @pytest.mark.skipif(sys.platform != "linux", reason="finds stopped processes in /proc")
    async def test_no_load_waits_for_idle_workers_that_are_stopped(
        self, worker, peft_folder, shapes, monkeypatch, caplog
    ):
        """The next load replaces all of them, without a look at a worker that has it."""
        monkeypatch.setattr(stopped_process, "LOOK_SECONDS", 600.0)
        # Not one adapter twice: the later one to store it may make the note of the other untrue.
        first, other = (str(peft_folder(f"r{rank}", rank=rank).write()) for rank in (2, 4))
        stage = functools.partial(worker.stage, shapes=shapes, max_ranks=RankLimits(8))
        await asyncio.gather(stage(first), stage(other))
        stopped = [each.process for each in worker._local.processes]
        assert len(stopped) == 2
        for process in stopped:
            os.kill(process.pid, signal.SIGSTOP)
            assert eventually(lambda pid=process.pid: is_stopped(pid))
        assert (await stage(first)).was_known
        assert [await process.wait() for process in stopped] == [-signal.SIGKILL] * 2
        assert caplog.text.count("an idle staging worker was stopped by a signal") == 2

    async def test_close_ends_it_and_may_come_twice(self, worker, peft_folder, shapes):
        await worker.stage(str(peft_folder().write()), shapes=shapes, max_ranks=RankLimits(8))
        process = process_of(worker)
        await worker.close()
        assert process.returncode == 0
        await worker.close()


class TestMisbehaviour:
    async def stage(self, tmp_path, shapes, code, **kwargs):
        worker = StagingWorker(tmp_path, command=python(code), **kwargs)
        try:
            await worker.stage("/some/adapter", shapes=shapes, max_ranks=RankLimits(8))
        finally:
            await worker.close()

    @pytest.mark.parametrize(
        "code",
        [
            "import sys; sys.stdin.buffer.read(8); sys.exit(3)",
            "import sys; sys.stdin.buffer.read(8); sys.stdout.write('abc'); sys.exit(3)",
        ],
    )
    async def test_a_crash_fails_the_one_in_work(self, tmp_path, shapes, code):
        with pytest.raises(AdapterLoadError, match=naming(3, "/some/adapter")):
            await self.stage(tmp_path, shapes, code)

    async def test_a_crash_does_not_fail_the_next(self, tmp_path, shapes, peft_folder):
        marker = tmp_path / "crashed"
        code = (
            "import pathlib, runpy, sys\n"
            f"marker = pathlib.Path({str(marker)!r})\n"
            "if not marker.exists():\n"
            "    marker.touch(); sys.exit(1)\n"
            "runpy.run_module('loraplex.adapters.staging_worker', run_name='__main__')\n"
        )
        worker = StagingWorker(tmp_path / "state", command=python(code), num_workers=1)
        folder = str(peft_folder().write())
        first, second = await asyncio.gather(
            worker.stage(folder, shapes=shapes, max_ranks=RankLimits(8)),
            worker.stage(folder, shapes=shapes, max_ranks=RankLimits(8)),
            return_exceptions=True,
        )
        await worker.close()
        assert isinstance(first, AdapterLoadError)
        assert second.source.digest

    async def test_a_worker_that_let_others_go_first_is_replaced(
        self, tmp_path, shapes, peft_folder
    ):
        code = (
            "import os\n"
            "from loraplex.adapters import staging_worker\n"
            "stage = staging_worker.stage\n"
            "staging_worker.stage = lambda *request: (os.nice(1), stage(*request))[1]\n"
            "staging_worker.main()\n"
        )
        worker = StagingWorker(tmp_path / "state", command=python(code))
        await worker.start()
        process = process_of(worker)
        folder = str(peft_folder().write())
        staged = await worker.stage(folder, shapes=shapes, max_ranks=RankLimits(8))
        assert not worker._local.processes
        assert process.returncode is not None
        again = await worker.stage(folder, shapes=shapes, max_ranks=RankLimits(8))
        assert (again.source, again.was_known) == (staged.source, True)
        await worker.close()

    @pytest.mark.parametrize(
        "reply", [b"\xff" * 8, b"\x01" + bytes(7) + b"\xc1", b"\x01" + bytes(7) + b"\x80"]
    )
    async def test_an_unreadable_reply(self, tmp_path, shapes, reply):
        code = (
            f"import sys, time; sys.stdout.buffer.write({reply!r}); sys.stdout.flush(); "
            "sys.stdin.buffer.read()"
        )
        with pytest.raises(AdapterLoadError, match=naming("reply")):
            await self.stage(tmp_path, shapes, code)

    @pytest.mark.skipif(sys.platform != "linux", reason="finds stopped processes in /proc")
    async def test_workers_that_are_stopped_again_are_a_retryable_error(self, tmp_path, shapes):
        stopping = python("import os, signal; os.kill(os.getpid(), signal.SIGSTOP)")
        worker = StagingWorker(tmp_path, command=stopping)
        with pytest.raises(AdapterLoadError, match=naming("x", "signal")):
            await worker.stage("x", shapes=shapes, max_ranks=RankLimits(8))
        assert not worker._local.processes
        await worker.close()

    async def test_a_worker_that_is_killed_at_work_is_replaced(
        self, tmp_path, shapes, peft_folder, caplog
    ):
        marker = tmp_path / "killed"
        code = (
            "import os, pathlib, runpy, signal, sys\n"
            f"marker = pathlib.Path({str(marker)!r})\n"
            "if not marker.exists():\n"
            "    sys.stdin.buffer.read(8); marker.touch(); os.kill(os.getpid(), signal.SIGKILL)\n"
            "runpy.run_module('loraplex.adapters.staging_worker', run_name='__main__')\n"
        )
        worker = StagingWorker(tmp_path / "state", command=python(code))
        folder = str(peft_folder().write())
        staged = await worker.stage(folder, shapes=shapes, max_ranks=RankLimits(8))
        await worker.close()
        assert staged.source.digest
        assert f"{folder} was killed by SIGKILL; a system short of memory" in caplog.text

    async def test_workers_that_are_killed_again_are_a_retryable_error(self, tmp_path, shapes):
        code = "import os, signal, sys; sys.stdin.buffer.read(8); os.kill(os.getpid(), 9)"
        with pytest.raises(AdapterLoadError, match=naming("SIGKILL")):
            await self.stage(tmp_path, shapes, code)

    async def test_a_hang_ends_at_the_time_limit(self, tmp_path, shapes):
        code = "import time; time.sleep(60)"
        with pytest.raises(AdapterLoadError, match=naming(0.05)):
            await self.stage(tmp_path, shapes, code, timeout_seconds=0.05)

    async def test_a_command_that_does_not_exist(self, tmp_path, shapes):
        worker = StagingWorker(tmp_path, command=("/does/not/exist",))
        with pytest.raises(AdapterLoadError):
            await worker.stage("/a", shapes=shapes, max_ranks=RankLimits(8))
        await worker.close()

    async def test_a_caller_that_gives_up_does_not_shift_the_replies(
        self, worker, peft_folder, shapes
    ):
        folders = [str(peft_folder(f"a{seed}", seed=seed).write()) for seed in range(2)]
        expected = await worker.stage(folders[1], shapes=shapes, max_ranks=RankLimits(8))
        task = asyncio.create_task(worker.stage(folders[0], shapes=shapes, max_ranks=RankLimits(8)))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        got = await worker.stage(folders[1], shapes=shapes, max_ranks=RankLimits(8))
        assert got.source == expected.source

    async def test_stderr_goes_to_the_log(self, tmp_path, shapes, caplog):
        code = "import sys; sys.stderr.write('trouble\\n' * 3); sys.exit(1)"
        with (
            caplog.at_level(logging.WARNING, "loraplex.adapters.staging"),
            pytest.raises(AdapterLoadError),
        ):
            await self.stage(tmp_path, shapes, code)
        assert [r.getMessage() for r in caplog.records] == ["staging worker: trouble"] * 3


# Marks itself and waits for ever if a file is there when it starts; does the rest otherwise.
STUCK_WHILE = """
import os, pathlib, runpy, sys, time
file = pathlib.Path({stuck!r})
if sys.stdin.buffer.peek(1) and file.exists():
    file.with_name(f"{{os.getpid()}}.stuck").touch()
    while True:
        time.sleep(60)
{rest}
"""
STAGE = 'runpy.run_module("loraplex.adapters.staging_worker", run_name="__main__")'
# Replies that an adapter is staged. It imports what a worker needs for that, and nothing else.
REPLY = f"""
import msgspec
staged = msgspec.msgpack.decode({msgspec.msgpack.encode(staged_adapter(b"any"))!r})
while head := sys.stdin.buffer.read(8):
    body = sys.stdin.buffer.read(int.from_bytes(head, "little"))
    request_id = msgspec.msgpack.decode(body)["request_id"]
    reply = msgspec.msgpack.encode({{"request_id": request_id, "staged": staged}})
    sys.stdout.buffer.write(len(reply).to_bytes(8, "little") + reply)
    sys.stdout.flush()
"""


def stuck_while(file: Path, rest: str = REPLY) -> tuple[str, ...]:
    return python(STUCK_WHILE.format(stuck=str(file), rest=rest))


class TestTenantsShareTheWorkers:
    @pytest.fixture
    async def stuck(self, request, tmp_path):
        """Workers that never reply, as long as the file exists at their first request."""
        file = tmp_path / "stuck"
        file.touch()
        command = stuck_while(file, getattr(request, "param", REPLY))
        worker = StagingWorker(tmp_path / "state", command=command, num_workers=2)
        worker.file = file
        yield worker
        await worker.close()

    async def occupy(self, stuck, shapes, tenant, num_loads, num_stuck=2):
        tasks = [
            asyncio.create_task(
                stuck.stage(f"/{tenant}/{i}", shapes=shapes, max_ranks=RankLimits(8), tenant=tenant)
            )
            for i in range(num_loads)
        ]
        await self.are_stuck(stuck, num_stuck)
        return tasks

    async def are_stuck(self, stuck, num_stuck):
        while len(list(stuck.file.parent.glob("*.stuck"))) < num_stuck:
            await asyncio.sleep(0.01)

    async def test_loads_of_a_tenant_wait_for_no_other_tenant(self, stuck, shapes, peft_folder):
        tasks = await self.occupy(stuck, shapes, "hostile", 5)
        stuck.file.unlink()
        folder = str(peft_folder().write())
        for tenant in ("quick", ""):
            assert await stuck.stage(folder, shapes=shapes, max_ranks=RankLimits(8), tenant=tenant)
        assert not any(task.done() for task in tasks)
        await end(tasks)

    async def test_the_first_load_of_a_tenant_finds_a_process(self, stuck, shapes, peft_folder):
        tasks = await self.occupy(stuck, shapes, "hostile", 5)
        stuck.file.unlink()
        before = [one.process.pid for one in stuck._local.processes]
        assert len(before) == 3  # two are stuck, one is idle
        folder = str(peft_folder().write())
        await stuck.stage(folder, shapes=shapes, max_ranks=RankLimits(8), tenant="quick")
        after = [one.process.pid for one in stuck._local.processes]
        assert set(before) < set(after)
        assert len(after) == 4  # a spare one started for the load after it
        await end(tasks)

    async def test_a_started_process_is_left_to_a_tenant_without_loads(
        self, stuck, shapes, peft_folder
    ):
        await stuck.start()
        (first,) = stuck._local.processes
        tasks = await self.occupy(stuck, shapes, "hostile", 1, num_stuck=1)
        (idle,) = stuck._local._idle
        tasks += await self.occupy(stuck, shapes, "hostile", 1)
        assert stuck._local._idle == [idle]
        stuck.file.unlink()
        folder = str(peft_folder().write())
        await stuck.stage(folder, shapes=shapes, max_ranks=RankLimits(8), tenant="quick")
        assert first not in stuck._local._idle
        assert stuck._local._idle[-1] is idle  # the next load takes it again, not the spare one
        await end(tasks)

    @pytest.mark.parametrize("num_loads", [1, 2, 5])
    async def test_a_first_load_takes_a_process_that_ran_before_anothers_load_began(
        self, tmp_path, shapes, peft_folder, num_loads
    ):
        """Processes that start meanwhile may take seconds on a busy machine."""
        file = tmp_path / "stuck"
        file.touch()
        command = stuck_while(file)
        worker = StagingWorker(tmp_path / "state", command=command, num_workers=2, has_tenants=True)
        worker.file = file
        await worker.start()
        await worker.keep_spare()
        started = {one.process.pid for one in worker._local.processes}
        assert len(started) == 2
        tasks = await self.occupy(worker, shapes, "hostile", num_loads, min(num_loads, 2))
        file.unlink()
        (left,) = [one for one in worker._local._idle if one.process.pid in started]
        folder = str(peft_folder().write())
        await worker.stage(folder, shapes=shapes, max_ranks=RankLimits(8), tenant="quick")
        assert worker._local._idle[-1] is left
        assert left.process.pid in started
        assert not any(task.done() for task in tasks)
        await end(tasks)
        await worker.close()

    async def test_more_processes_than_needed_are_not_kept(self, tmp_path, shapes, peft_folder):
        command = stuck_while(tmp_path / "not there")
        worker = StagingWorker(tmp_path / "state", command=command, num_workers=1)
        folder = str(peft_folder().write())
        loads = (
            worker.stage(folder, shapes=shapes, max_ranks=RankLimits(8), tenant=f"tenant-{i}")
            for i in range(5)
        )
        await asyncio.gather(*loads)
        assert len(worker._local.processes) == 3
        await worker.close()

    async def test_a_client_that_leaves_frees_the_worker(self, stuck, shapes, peft_folder):
        tasks = await self.occupy(stuck, shapes, "one", 2)
        stuck.file.unlink()
        folder = str(peft_folder().write())
        waiting = asyncio.create_task(
            stuck.stage(folder, shapes=shapes, max_ranks=RankLimits(8), tenant="one")
        )
        await asyncio.sleep(0)
        processes = [one.process for one in stuck._local.processes]
        tasks[0].cancel()
        assert await waiting
        assert [process.returncode for process in processes].count(-signal.SIGKILL) == 1
        await end(tasks)

    async def test_what_waits_at_the_end_starts_no_process(self, stuck, shapes):
        tasks = await self.occupy(stuck, shapes, "one", 3)
        for one in stuck._local.processes:
            one.process.kill()
        await stuck.close()
        errors = await asyncio.gather(*tasks, return_exceptions=True)
        assert {type(error) for error in errors} == {AdapterLoadError}
        assert re.search(naming("/one/2"), errors[2].message)
        assert len(list(stuck.file.parent.glob("*.stuck"))) == 2

    @pytest.mark.parametrize("stuck", [STAGE], indirect=True, ids=["real"])
    async def test_tensors_of_a_request_wait_for_no_download(self, stuck, shapes, tmp_path):
        downloads = [
            asyncio.create_task(
                stuck.stage(f"http://127.0.0.1:9/{i}", shapes=shapes, max_ranks=RankLimits(8))
            )
            for i in range(3)
        ]
        await self.are_stuck(stuck, 2)
        stuck.file.unlink()
        tensor = RequestTensor("FP32", (1, 1, 1), bytes(4))
        with pytest.raises(InvalidAdapterError):
            await stuck.stage_tensors(tensor, tensor, shapes=shapes, max_ranks=RankLimits(8))
        assert not any(task.done() for task in downloads)
        await end(downloads)


async def end(tasks):
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
