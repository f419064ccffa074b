"""State that survives when a process dies or is stopped."""

import concurrent.futures
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from loraplex.demo import BASE_PATH
from loraplex.testing.running_server import RunningServer, serving

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="finds child processes in /proc"),
    pytest.mark.xdist_group("restart"),
]

LONG = {
    "model": "capitals",
    "prompt": "x",
    "max_tokens": 500,
    "ignore_eos": True,
    "temperature": 0,
}
SHORT = {"model": "chinese", "prompt": "x", "max_tokens": 4, "ignore_eos": True}


def engine_pid(server: RunningServer) -> int:
    pid = server.process.pid
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return next(
        int(child)
        for child in children
        if "loraplex.app.engine_process" in Path(f"/proc/{child}/cmdline").read_text()
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


def test_a_killed_engine_comes_back_and_goes_on(tmp_path):
    patient = ("--engine-wait-seconds", "170")  # however slow the machine is
    with serving(tmp_path, *patient) as server, concurrent.futures.ThreadPoolExecutor(5) as pool:
        _, expected = server.post("/v1/completions", LONG)
        num_before = num_steps(server)
        jobs = [pool.submit(server.post, "/v1/completions", LONG) for _ in range(4)]
        wait_for(lambda: num_steps(server) > num_before + 2)
        first = engine_pid(server)
        os.kill(first, signal.SIGKILL)
        server.wait_until(ready=False)
        late = pool.submit(server.post, "/v1/completions", SHORT)
        assert server.get("/health/live")[0] == 200
        for job in jobs:
            status, body = job.result()
            assert status == 200, body
            assert body["choices"] == expected["choices"]
        status, body = late.result()
        assert status == 200, body
        assert server.is_ready()
        assert engine_pid(server) != first
        assert server.stop() == 0


def test_an_engine_that_cannot_come_back(tmp_path):
    """Its model's folder is gone: what was accepted ends with an error, and the server stands."""
    folder = tmp_path / "model"
    shutil.copytree(BASE_PATH, folder)
    flags = ["--engine-restart-seconds", "6", "--engine-wait-seconds", "2"]
    with (
        serving(tmp_path / "state", *flags, model=folder) as server,
        concurrent.futures.ThreadPoolExecutor(2) as pool,
    ):
        job = pool.submit(server.post, "/v1/completions", LONG)
        wait_for(lambda: num_steps(server) > 2)
        shutil.rmtree(folder)
        os.kill(engine_pid(server), signal.SIGKILL)
        server.wait_until(ready=False)
        status, body = server.post("/v1/completions", SHORT)
        assert (status, body["error"]["code"]) == (503, "not_ready")
        status, body = job.result()
        assert (status, body["error"]["code"]) == (503, "engine_restarted")
        assert server.get("/health/live")[0] == 200
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
        wait_for(lambda: is_gone(engine))
