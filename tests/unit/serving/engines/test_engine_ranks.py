"""Engines of three processes: whatever happens to one rank, every request continues."""

import os
import signal
import sys
from pathlib import Path

import pytest

from loraplex.core.clock import SystemClock
from loraplex.core.errors import ConfigError, NotReadyError
from loraplex.core.stopped_process import state_of
from loraplex.serving.engines import engine_watchdog
from loraplex.serving.engines.async_engine import AsyncEngine
from loraplex.serving.engines.engine_state import EngineEnd
from loraplex.serving.engines.engine_watchdog import EngineWatchdog, StepLimits
from support.fake_engine_process import FakeEngineSettings, fake_engine_process
from support.fake_loader import fake_source
from support.fake_ranks import FakeRankSettings
from support.fake_runner import FAKE_CAPACITY
from support.naming import naming
from support.scripted_engine import tokens_of, until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="ends ranks by prctl(2)")

SOURCE = fake_source("digest", FAKE_CAPACITY.page_geometry)


def engine_of(watchdog=None, **ranks):
    settings = FakeEngineSettings(ranks=FakeRankSettings(**ranks))
    return AsyncEngine("m", fake_engine_process(settings), SystemClock(), watchdog=watchdog)


def rank_pids(engine):
    pid = engine._link.pid
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in children]


def are_gone(pids):
    return all(state_of(pid) in (None, "Z") for pid in pids)


async def test_ranks_end_with_their_engine(temporary_folder, make_request):
    engine = engine_of()
    await engine.start()
    pids = rank_pids(engine)
    assert len(pids) == 2
    assert len((await tokens_of(engine.submit(make_request(1, "digest"), [SOURCE])))[0]) == 3
    assert engine.stats.rank_wait_ns == (1000, 1001, 1002)
    await engine.close()
    await until(lambda: are_gone(pids))


async def test_ranks_end_with_a_killed_engine(temporary_folder, make_request):
    engine = engine_of()
    await engine.start()
    pids = rank_pids(engine)
    os.kill(pids[1], signal.SIGSTOP)
    os.kill(engine._link.pid, signal.SIGKILL)
    await until(lambda: are_gone(pids))
    await engine.close()


@pytest.fixture(scope="module")
def alone() -> list[dict[int, list[int]]]:
    """Tokens that an engine of one process writes, once a test has started one."""
    return []


@pytest.mark.parametrize(
    ("fault", "end", "reason"),
    [
        ("kill", EngineEnd.KILL, "rank 2 (process "),
        ("raise", EngineEnd.CRASH, "rank 2"),
        ("row", EngineEnd.CRASH, "rank 2 sampled other tokens than rank 0 in step"),
    ],
)
async def test_requests_continue_after_the_end_of_a_rank(
    temporary_folder, make_request, caplog, tmp_path, alone, fault, end, reason
):
    requests = [make_request(i, "digest", n=2, max_tokens=20) for i in (1, 2)]
    if not alone:
        one_process = AsyncEngine("m", fake_engine_process(), SystemClock())
        await one_process.start()
        alone += [await tokens_of(one_process.submit(one, [SOURCE])) for one in requests]
        await one_process.close()
    engine = engine_of(rank=2, fault=fault, bad_step=10, once=str(tmp_path / "fault"))
    await engine.start()
    streams = [engine.submit(request, [SOURCE]) for request in requests]
    assert [await tokens_of(stream) for stream in streams] == alone
    assert engine.restarts == {end: 1}
    assert f"ended: {reason}" in caplog.text
    await engine.close()


async def test_a_rank_that_is_killed_between_steps(temporary_folder, make_request, caplog):
    engine = engine_of()
    await engine.start()
    os.kill(rank_pids(engine)[0], signal.SIGKILL)
    await until(lambda: engine.num_restarts == 1 and engine.is_ready)
    assert engine.restarts == {EngineEnd.KILL: 1}
    assert "was killed by SIGKILL" in caplog.text
    assert len((await tokens_of(engine.submit(make_request(), [])))[0]) == 3
    await engine.close()


async def test_a_stopped_rank_is_a_hung_engine(
    temporary_folder, make_request, monkeypatch, tmp_path
):
    monkeypatch.setattr(engine_watchdog, "_IDLE_SECONDS", 3.0)
    watchdog = EngineWatchdog(SystemClock(), StepLimits(least_seconds=3.0))
    engine = engine_of(watchdog, fault="stop", bad_step=5, once=str(tmp_path / "fault"))
    await engine.start()
    pids = rank_pids(engine)
    assert len((await tokens_of(engine.submit(make_request(max_tokens=10), [])))[0]) == 10
    assert engine.restarts == {EngineEnd.HANG: 1}
    await until(lambda: are_gone(pids))
    await engine.close()


async def test_a_rank_that_is_stopped_while_the_engine_is_idle(
    temporary_folder, make_request, monkeypatch
):
    """Loads and pins would wait for it; no step does. The engine in its place has them."""
    monkeypatch.setattr(engine_watchdog, "_IDLE_SECONDS", 3.0)
    engine = engine_of(EngineWatchdog(SystemClock(), StepLimits(least_seconds=3.0)))
    await engine.start()
    pids = rank_pids(engine)
    os.kill(pids[0], signal.SIGSTOP)
    stream = engine.submit(make_request(1, "digest"), [SOURCE])
    with pytest.raises(NotReadyError):
        await engine.pin(SOURCE)
    assert len((await tokens_of(stream))[0]) == 3
    assert engine.restarts == {EngineEnd.HANG: 1}
    await engine.pin(SOURCE)
    await until(lambda: are_gone(pids))
    await engine.close()


@pytest.mark.parametrize(
    ("ranks", "named"),
    [
        ({"other_version": "2"}, (0, 1, 2)),
        ({"start_error": "no memory"}, (1,)),
        ({"dies_at_start": True}, ("SIGKILL",)),
    ],
)
async def test_a_rank_that_cannot_start(temporary_folder, ranks, named):
    engine = engine_of(**ranks)
    with pytest.raises(ConfigError, match=naming(*named)):
        await engine.start()
    await engine.close()
