import os
import sys
import time

import pytest
from comparison.processes import ServerProcess, cpu_seconds, process_tree, resident_bytes

from loraplex.core.errors import ConfigError

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
    with pytest.raises(ConfigError, match="status 3 before it was ready: no such model"):
        await process.wait_until(never, 30)


async def test_one_that_is_never_ready_is_stopped(tmp_path):
    process = await ServerProcess.start(
        [sys.executable, "-c", "import time; time.sleep(60)"], tmp_path / "log"
    )
    with pytest.raises(ConfigError, match=r"not ready within 0\.1 seconds"):
        await process.wait_until(never, 0.1)
    assert not process.is_running


async def test_a_program_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ConfigError, match="cannot run no-such-program"):
        await ServerProcess.start(["no-such-program"], tmp_path / "log")
