import json
import os
import sys
import time
from pathlib import Path

import pytest
from comparison.processes import (
    Launch,
    ServerProcess,
    cpu_seconds,
    process_tree,
    resident_bytes,
    variables_of_children,
)

from loraplex.core.errors import ConfigError
from support.naming import naming

LINUX = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
PARENT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; b = bytearray({}); time.sleep(60)"])
print("up", child.pid, flush=True)
time.sleep(60)
"""


async def start(tmp_path, num_bytes=0) -> ServerProcess:
    log = tmp_path / "log"
    process = await ServerProcess.start([sys.executable, "-c", PARENT.format(num_bytes)], log)

    async def is_up() -> bool:
        return "up" in log.read_text() and len(process_tree([process.pid])) == 2

    await process.wait_until(is_up, 30)
    return process


@LINUX
async def test_the_tree_is_found_and_ends_whole(tmp_path):
    process = await start(tmp_path)
    tree = process_tree([process.pid])
    assert process.pid in tree
    await process.stop()
    end = time.monotonic() + 60
    while process_tree(tree) and time.monotonic() < end:
        time.sleep(0.01)
    assert process_tree(tree) == []
    assert not process.is_running
    await process.stop()


@LINUX
async def test_memory_of_children_counts(tmp_path):
    process = await start(tmp_path, 64 << 20)
    try:
        end = time.monotonic() + 60
        while resident_bytes([process.pid]) < 64 << 20 and time.monotonic() < end:
            time.sleep(0.01)
        assert 64 << 20 <= resident_bytes([process.pid]) < 160 << 20
        assert resident_bytes([]) == 0
    finally:
        await process.stop()


@LINUX
def test_time_of_this_process_passes():
    before = cpu_seconds([os.getpid()])
    end = time.process_time() + 0.05
    while time.process_time() < end:
        pass
    assert 0.03 <= cpu_seconds([os.getpid()]) - before < 5


async def never() -> bool:
    return False


async def test_one_that_ends_early_is_reported_with_its_log(tmp_path):
    code = "import sys; print('no such model', file=sys.stderr); sys.exit(3)"
    process = await ServerProcess.start([sys.executable, "-c", code], tmp_path / "log")
    with pytest.raises(ConfigError, match=naming(3)):
        await process.wait_until(never, 30)


async def test_one_that_is_never_ready_is_stopped(tmp_path):
    process = await ServerProcess.start(
        [sys.executable, "-c", "import time; time.sleep(60)"], tmp_path / "log"
    )
    with pytest.raises(ConfigError, match=naming(0.1)):
        await process.wait_until(never, 0.1)
    assert not process.is_running


async def test_a_program_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ConfigError, match=naming("no-such-program")):
        await ServerProcess.start(["no-such-program"], tmp_path / "log")


PRINTS = "import json, os; print(json.dumps(dict(os.environ)))"


async def printed_environment(log: Path, variables: dict[str, str]) -> tuple[dict, Launch]:
    process = await ServerProcess.start([sys.executable, "-c", PRINTS], log, variables)
    assert await process.wait() == 0
    await process.stop()
    return json.loads(log.read_text()), process.launch


@pytest.mark.parametrize("policy", [None, "ACTIVE"])
async def test_a_program_runs_in_the_users_environment(monkeypatch, tmp_path, policy):
    """Ours would have OMP_WAIT_POLICY=PASSIVE, which slows programs that use OpenMP."""
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    if policy is not None:
        monkeypatch.setenv("OMP_WAIT_POLICY", policy)
    monkeypatch.setenv("KMP_BLOCKTIME", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    users = dict(os.environ)
    # A setting or key of ours is for our own server, which gets its settings as flags.
    monkeypatch.setenv("LORAPLEX_API_KEY", "secret")
    monkeypatch.setenv("LORAPLEX_LOG_FORMAT", "json")
    added = {"OMP_NUM_THREADS": "2", "PEER_OPTION": "on"}
    environment, launch = await printed_environment(tmp_path / "log", added)
    # The interpreter itself sets LC_CTYPE in the C locale (PEP 538).
    environment.pop("LC_CTYPE", None)
    users.pop("LC_CTYPE", None)
    assert environment == users | added
    assert launch.command == (sys.executable, "-c", PRINTS)
    assert launch.added == added
    assert launch.inherited.get("OMP_WAIT_POLICY") == policy
    assert launch.inherited["KMP_BLOCKTIME"] == "1"
    assert "OMP_NUM_THREADS" not in launch.inherited


SETS = """
import os, subprocess, sys
code = "print('up', flush=True); import time; time.sleep(60)"
subprocess.run([sys.executable, "-c", code], env=os.environ | {"OMP_WAIT_POLICY": "PASSIVE"})
"""


@LINUX
async def test_what_a_program_sets_for_its_children_is_found(tmp_path):
    log = tmp_path / "log"
    process = await ServerProcess.start([sys.executable, "-c", SETS], log, {"OMP_NUM_THREADS": "2"})

    async def is_up() -> bool:
        return "up" in log.read_text()

    await process.wait_until(is_up, 30)
    found = variables_of_children([process.pid])
    await process.stop()
    assert (found["OMP_WAIT_POLICY"], found["OMP_NUM_THREADS"]) == ("PASSIVE", "2")


STUBBORN = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
code = "import time; print('up', flush=True); time.sleep(60)"
child = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
time.sleep(60)
"""


@LINUX
@pytest.mark.parametrize("all_at_once", [False, True])
async def test_one_that_ignores_sigterm_ends_with_children_of_other_sessions(tmp_path, all_at_once):
    log = tmp_path / "log"
    process = await ServerProcess.start([sys.executable, "-c", STUBBORN], log)

    async def is_up() -> bool:
        return "up" in log.read_text()

    await process.wait_until(is_up, 30)
    tree = process_tree([process.pid])
    assert len(tree) == 2
    if all_at_once:
        ServerProcess.kill_all()
        await ServerProcess.stop_all()
    else:
        await process.stop(0.1)
    end = time.monotonic() + 60
    while process_tree(tree) and time.monotonic() < end:
        time.sleep(0.01)
    assert process_tree(tree) == []
