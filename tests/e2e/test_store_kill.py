"""Serving is killed as it loads, replaces, unloads, rolls back and takes in a request's weights."""

import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

from loraplex.adapters.canonical import digest, read_canonical
from loraplex.adapters.state_files import canonical_path
from loraplex.adapters.store import AdapterStore
from loraplex.core.adapter import AdapterRef, ByName

pytestmark = [pytest.mark.soak, pytest.mark.xdist_group("kill")]

WORKER = Path(__file__).with_name("server_crash_worker.py")
NUM_KILLS = 50
MOST_CHANGES = 6
LONGEST_WAIT_SECONDS = 0.02
"""After a change was announced: some changes take a hundredth of a second, some less."""


@pytest.fixture
def workers(tmp_path):
    """Forks them; their imports would take longer than all the rest."""
    command = [sys.executable, "-W", "ignore", str(WORKER), str(tmp_path)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        yield process
        process.stdin.close()
        assert process.wait() == 0


def run_and_kill(workers, seed, num_changes, seconds):
    """Return what the worker reported until it was killed, this long into its last change."""
    workers.stdin.write(b"%d\n" % seed)
    workers.stdin.flush()
    reported, pid = [], None
    while "status" not in (line := json.loads(workers.stdout.readline())):
        if "pid" in line:
            pid = line["pid"]
            continue
        reported.append(line)
        if sum("before" in one for one in reported) == num_changes and "before" in line:
            time.sleep(seconds)
            os.kill(pid, signal.SIGKILL)
    assert line["status"] == -signal.SIGKILL
    return reported


def state_of(store):
    return {v.name: [v.number, v.digest, v.task_id] for v in store.list("default")}


def check_files(store, state_dir):
    """Every version that is kept has its file, whole."""
    assert store.missing() == []
    kept = set()
    for present in store.list("default"):
        history = store.history(AdapterRef("capitals", "default", ByName(present.name)))
        assert history[0] == present
        kept |= {version.digest for version in history}
    for known in kept:
        content = read_canonical(canonical_path(state_dir, known))
        assert content.digest == known == digest(content.rows)
    return kept


def test_each_name_is_at_its_old_or_its_new_version(workers, tmp_path):
    state_dir = tmp_path / "state"
    state, chance = {}, random.Random(5)
    num_done = num_lost = num_kept = 0
    for seed in range(NUM_KILLS):
        changes, wait = chance.randint(1, MOST_CHANGES), chance.uniform(0, LONGEST_WAIT_SECONDS)
        possible = [state]
        for line in run_and_kill(workers, seed, changes, wait):
            if "done" in line:
                possible = [possible[-1]]
                num_done += 1
            else:
                assert line["before"] == possible[-1]
                possible = [line["before"], line["after"]]
        store = AdapterStore.open(state_dir)
        state = state_of(store)
        assert state in possible
        if len(possible) == 2 and possible[0] != possible[1]:
            num_lost += state == possible[0]
            num_kept += state == possible[1]
        kept = check_files(store, state_dir)
        store.close()
    assert num_done > NUM_KILLS
    assert num_lost > NUM_KILLS // 10
    store = AdapterStore.open(state_dir)
    store.collect_garbage((), 0)
    store.close()
    left = {path.name for path in state_dir.glob("adapters/*/*")}
    assert left == {f"{known}.safetensors" for known in kept}
    connection = sqlite3.connect(state_dir / "adapters.sqlite3")
    assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    connection.close()
