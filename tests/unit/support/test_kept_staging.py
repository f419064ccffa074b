"""Pools of later tests get the workers that earlier ones left, and only those that were idle."""

import asyncio
import contextlib
import os
import signal
from pathlib import Path

import pytest

from loraplex.adapters.shapes import BaseShapes
from loraplex.adapters.staging import StagingWorker
from loraplex.core.errors import AdapterLoadError
from loraplex.core.rank_limits import RankLimits
from support import kept_staging
from support.eventually import eventually
from support.kept_staging import keeping_staging_processes


@contextlib.asynccontextmanager
async def started(folder, code="cat; echo the end >&2"):
    """A pool with one started process, and the process."""
    worker = StagingWorker(folder, command=("sh", "-c", f"{code} # {folder}"))
    with keeping_staging_processes():
        await worker.start()
        (one,) = worker._local.processes
        yield worker, one.process
        await worker.close()
    assert one.process is None


async def pid_of_the_next(folder):
    async with started(folder) as (_, process):
        return process.pid


async def test_an_idle_process_is_left_to_the_next_pool(tmp_path, caplog):
    pid = await pid_of_the_next(tmp_path)
    assert Path(f"/proc/{pid}").exists()
    assert [await pid_of_the_next(tmp_path) for _ in range(2)] == [pid] * 2
    assert "the end" not in caplog.text


async def test_its_log_is_that_of_its_test(tmp_path, caplog):
    code = f"echo trouble >&2; touch {tmp_path}/written; cat"
    async with started(tmp_path, code) as (_, process):
        assert eventually((tmp_path / "written").exists)
    assert "staging worker: trouble" in caplog.text
    caplog.clear()
    async with started(tmp_path, code) as (_, same):
        assert same.pid == process.pid
    assert not caplog.text


async def test_another_environment_has_other_processes(tmp_path, monkeypatch):
    pid = await pid_of_the_next(tmp_path)
    monkeypatch.setenv("ANOTHER", "1")
    assert await pid_of_the_next(tmp_path) != pid


async def test_one_with_a_request_ends(tmp_path):
    async with started(tmp_path, "cat >/dev/null") as (worker, process):
        staging = worker.stage("/a", shapes=BaseShapes(1, {}), max_ranks=RankLimits(8))
        task = asyncio.create_task(staging)
        while not process.has_request:
            await asyncio.sleep(0)
    assert process.returncode == 0
    assert not Path(f"/proc/{process.pid}").exists()
    with pytest.raises(AdapterLoadError):
        await task


async def test_one_that_was_killed_is_not_taken(tmp_path):
    pid = await pid_of_the_next(tmp_path)
    os.kill(pid, signal.SIGKILL)
    assert eventually(lambda: b" Z " in Path(f"/proc/{pid}/stat").read_bytes())
    assert await pid_of_the_next(tmp_path) != pid


async def test_few_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(kept_staging, "_MAX_KEPT", 1)
    pids = [await pid_of_the_next(tmp_path / name) for name in "ab"]
    assert [Path(f"/proc/{pid}").exists() for pid in pids] == [False, True]
