"""Ranks as child processes: their ends, and those of processes that are no ranks."""

import os
import queue
import sys

import pytest

from loraplex.core.errors import ConfigError
from loraplex.parallel.messages import RankStart
from loraplex.parallel.multiprocess import MultiprocessExecutor
from loraplex.parallel.world import World
from support.naming import naming

SECONDS = 60
STARTS = [
    RankStart(address="ipc:///x", token="t", world=world, settings=b"")
    for world in World(0, 3, 1).others()
]


def ends_of(program, starts=STARTS[:1]):
    ends = queue.SimpleQueue()
    executor = MultiprocessExecutor(lambda rank: (sys.executable, "-c", program, str(rank)))
    executor.start(starts, ends.put)
    found = sorted(ends.get(timeout=SECONDS) for _ in starts)
    executor.stop(0)
    return found


@pytest.mark.parametrize(
    ("program", "how", "is_kill"),
    [
        ("", "ended with status 0", False),
        ("raise SystemExit(3)", "ended with status 3", False),
        ("import os; os.kill(os.getpid(), 9)", "was killed by SIGKILL", True),
        ("import os; os.kill(os.getpid(), 15)", "was killed by SIGTERM", True),
        ("import os; os.abort()", "was killed by SIGABRT", False),
    ],
)
def test_how_a_rank_ended(program, how, is_kill):
    (end,) = ends_of(program)
    assert str(end).startswith("rank 1 (process ")
    assert end.how.endswith(how)
    assert end.is_kill is is_kill


def test_each_rank_has_its_own_end():
    ends = ends_of("import sys; sys.exit(int(sys.argv[1]))", STARTS)
    assert [(end.rank, end.how[-8:]) for end in ends] == [(1, "status 1"), (2, "status 2")]


def test_stop_ends_what_does_not_end_by_itself():
    ends = queue.SimpleQueue()
    executor = MultiprocessExecutor(
        lambda rank: (sys.executable, "-c", "import time; time.sleep(1000)")
    )
    executor.start(STARTS, ends.put)
    executor.stop(0)
    assert {ends.get(timeout=SECONDS).rank for _ in STARTS} == {1, 2}


def test_a_program_that_cannot_be_started():
    executor = MultiprocessExecutor(lambda rank: ("/nowhere/python",))
    with pytest.raises(ConfigError, match=naming(1)):
        executor.start(STARTS, lambda end: None)


def test_more_ranks_than_processors_are_reported(monkeypatch, caplog):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    ends_of("")
    assert caplog.text == ""
    ends_of("", STARTS)
    assert "3 ranks share 2 processors" in caplog.text
