"""A process that changes the store is killed, again and again: nothing is ever half-done."""

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

from loraplex.adapters.state_files import canonical_path
from loraplex.adapters.store import AdapterStore
from loraplex.core.adapter import AdapterRef, ByName

WORKER = Path(__file__).with_name("store_crash_worker.py")
NUM_KILLS = 30
LONGEST_RUN_SECONDS = 0.09


@pytest.fixture
def workers(tmp_path):
    """Forks them. The one that is killed is a grandchild; it shares the standard streams."""
    command = [sys.executable, "-W", "ignore", str(WORKER), str(tmp_path / "state")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        yield process
        process.stdin.close()
        assert process.wait() == 0


def run_and_kill(workers, seed, seconds):
    """Return what the worker reported; it must not have ended by itself."""
    workers.stdin.write(b"%d\n" % seed)
    workers.stdin.flush()
    reported = []
    while "status" not in (line := json.loads(workers.stdout.readline())):
        if "pid" in line:
            time.sleep(seconds)
            os.kill(line["pid"], signal.SIGKILL)
        else:
            reported.append(line)
    assert line["status"] == -signal.SIGKILL
    return reported


def state_of(store):
    return {
        "names": {v.name: [v.number, v.digest, v.task_id] for v in store.list("t")},
        "aliases": dict(store.aliases("t", "m")),
    }


def check_files(store, state_dir):
    assert store.missing() == []
    for present in store.list("t"):
        history = store.history(AdapterRef("m", "t", ByName(present.name)))
        assert history[0] == present
        assert all(canonical_path(state_dir, version.digest).is_file() for version in history)


def test_every_name_is_at_its_old_or_its_new_version(workers, tmp_path):
    state_dir = tmp_path / "state"
    state = {"names": {}, "aliases": {}}
    chance = random.Random(4)
    num_changes = num_interrupted = 0
    for seed in range(10 * NUM_KILLS):
        if seed >= NUM_KILLS < num_changes and num_interrupted > NUM_KILLS // 6:
            break  # a busy machine takes more kills to interrupt as many changes
        reported = run_and_kill(workers, seed, chance.uniform(0, LONGEST_RUN_SECONDS))
        possible = [state]
        for line in reported:
            if "done" in line:
                possible = [possible[-1]]
                num_changes += 1
            else:
                assert line["before"] == possible[-1]
                possible = [line["before"], line["after"]]
        num_interrupted += len(possible) == 2 and possible[0] != possible[1]
        store = AdapterStore.open(state_dir)
        state = state_of(store)
        assert state in possible
        check_files(store, state_dir)
        store.close()
    assert num_interrupted > NUM_KILLS // 6
    assert num_changes > NUM_KILLS
    check_that_nothing_was_left(state_dir, tmp_path)


def check_that_nothing_was_left(state_dir, folder):
    store = AdapterStore.open(state_dir)
    store.collect_garbage((), 0)
    refs = [AdapterRef("m", "t", ByName(version.name)) for version in store.list("t")]
    kept = {f"{v.digest}.safetensors" for ref in refs for v in store.history(ref)}
    assert {path.name for path in state_dir.glob("adapters/*/*")} == kept
    store.close()
    assert [path.name for path in folder.iterdir()] == ["state"]
    connection = sqlite3.connect(state_dir / "adapters.sqlite3")
    assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    assert connection.execute("PRAGMA foreign_key_check").fetchall() == []
    connection.close()
