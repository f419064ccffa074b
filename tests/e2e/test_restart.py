"""What survives when a process dies or is told to stop."""

import concurrent.futures
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from loraplex.testing.running_server import RunningServer, serving

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="finds child processes in /proc"),
    pytest.mark.xdist_group("restart"),
]

LONG = {"model": "capitals", "prompt": "x", "max_tokens": 500, "ignore_eos": True}
SHORT = {"model": "chinese", "prompt": "x", "max_tokens": 4, "ignore_eos": True}


def engine_pid(server: RunningServer) -> int:
    pid = server.process.pid
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return next(
        int(child)
        for child in children
        if "loraplex.app.engine" in Path(f"/proc/{child}/cmdline").read_text()
    )


def wait_for(condition: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come about in time"
        time.sleep(0.02)


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z"


def num_steps(server: RunningServer) -> int:
    return len(server.get("/v1/iterations?limit=1000")[1].split('"step_id"')) - 1


def test_a_killed_engine_fails_its_requests_and_comes_back(tmp_path):
    with serving(tmp_path) as server, concurrent.futures.ThreadPoolExecutor(4) as pool:
        jobs = [pool.submit(server.post, "/v1/completions", LONG) for _ in range(4)]
        wait_for(lambda: num_steps(server) > 2)
        first = engine_pid(server)
        os.kill(first, signal.SIGKILL)
        for job in jobs:
            status, body = job.result()
            assert status == 503
            assert body["error"]["code"] == "engine_restarted"
        server.wait_until(ready=False)
        status, body = server.post("/v1/completions", SHORT)
        assert status in (200, 503)  # it may be back already
        assert server.get("/health/live")[0] == 200
        server.wait_until(ready=True)
        status, body = server.post("/v1/completions", SHORT)
        assert status == 200, body
        assert engine_pid(server) != first
        assert server.stop() == 0


def test_sigterm_lets_requests_end_and_leaves_no_process(tmp_path):
    with serving(tmp_path) as server, concurrent.futures.ThreadPoolExecutor(1) as pool:
        job = pool.submit(server.post, "/v1/completions", {**LONG, "max_tokens": 200})
        wait_for(lambda: num_steps(server) > 2)
        engine = engine_pid(server)
        assert server.stop() == 0
        status, body = job.result()
        assert status == 200
        assert body["usage"]["completion_tokens"] == 200
        assert is_gone(engine)


def test_an_engine_ends_when_serving_is_killed(tmp_path):
    with serving(tmp_path) as server:
        engine = engine_pid(server)
        server.process.kill()
        server.process.wait()
        wait_for(lambda: is_gone(engine), seconds=10)
