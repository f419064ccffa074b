"""Faults of processes, disk and system, each with a stated outcome: nothing hangs or is lost.

The engine is killed in test_restart.py and test_engine_kills.py, as a system short of
memory does it. Clocks that jump are in the unit tests of engine_watchdog and service.
"""

import concurrent.futures
import contextlib
import functools
import http.client
import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from loraplex.demo import ADAPTER_PATHS, BASE_PATH
from loraplex.testing.running_server import MODEL, PORT_FLAGS, RunningServer, running, serving

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="finds child processes in /proc"),
    pytest.mark.xdist_group("restart"),
]

STEP_TIMEOUT = 3
LONG = {"model": MODEL, "prompt": "x", "max_tokens": 500, "ignore_eos": True, "temperature": 0}
SHORT = {**LONG, "max_tokens": 3}
NUM_FEW_FILES = 256
"""A server without connections opens about a quarter of that."""
GRAMMAR = {**SHORT, "guided_regex": "[a-c]{3}"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server that outlives all faults of this module."""
    flags = ("--step-timeout-seconds", str(STEP_TIMEOUT), "--engine-wait-seconds", "170")
    with serving(tmp_path_factory.mktemp("state"), *flags) as started:
        yield started
        assert started.stop() == 0


def child_pid(server: RunningServer, module: str) -> int:
    """Return the process of a module; there may be several workers: the first."""
    tasks = Path(f"/proc/{server.process.pid}/task")
    children = [child for task in tasks.iterdir() for child in _words(task / "children")]
    found = [child for child in children if module in " ".join(_words(f"/proc/{child}/cmdline"))]
    assert found, f"no process runs {module}"
    return int(found[0])


def _words(path: Path | str) -> list[str]:
    """Return the words of a file; none if it is gone, as its thread or process may be."""
    with contextlib.suppress(OSError):
        return Path(path).read_text().replace("\0", " ").split()
    return []


def engine_pid(server: RunningServer) -> int:
    return child_pid(server, "loraplex.app.engine_process")


def hangs(server: RunningServer) -> float:
    """Return how many engines hung, by the metrics."""
    metrics = server.get("/metrics", server.metrics_port)[1]
    start = f'loraplex_engine_restarts_total{{model="{MODEL}",reason="hang"}} '
    (line,) = (line for line in metrics.splitlines() if line.startswith(start))
    return float(line.removeprefix(start))


def completes(server: RunningServer) -> None:
    status, body = server.post("/v1/completions", SHORT)
    assert (status, body["usage"]["completion_tokens"]) == (200, 3), body


class TestHungProcesses:
    def test_a_stopped_engine_is_replaced_and_its_requests_continue(self, server):
        num_hangs = hangs(server)
        _, expected = server.post("/v1/completions", LONG)
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            jobs = [pool.submit(server.post, "/v1/completions", LONG) for _ in range(2)]
            time.sleep(0.1)
            stopped = engine_pid(server)
            os.kill(stopped, signal.SIGSTOP)
            server.wait_until(ready=False)
            assert server.get("/health/live")[0] == 200
            assert "is restarting" in server.get("/health/ready")[1]
            for job in jobs:
                status, body = job.result()
                assert (status, body.get("choices")) == (200, expected["choices"])
        assert server.is_ready()
        assert engine_pid(server) != stopped
        assert hangs(server) == num_hangs + 1

    def test_deadlines_and_queries_end_while_the_engine_is_stopped(self, server):
        """Neither waits for an engine that never responds."""
        server.wait_until(ready=True)
        os.kill(engine_pid(server), signal.SIGSTOP)
        status, body = server.post("/v1/completions", {**LONG, "timeout_seconds": 1})
        assert (status, body["error"]["code"]) == (504, "deadline_exceeded")
        status, _ = server.get("/v1/adapters")
        assert status in (200, 503)
        server.wait_until(ready=True)
        completes(server)

    def test_a_machine_that_sleeps_costs_no_engine(self, server):
        """Server and engine are stopped together, for longer than an engine may be silent."""
        server.wait_until(ready=True)
        engine = engine_pid(server)
        for pid in (server.process.pid, engine):
            os.kill(pid, signal.SIGSTOP)
        time.sleep(STEP_TIMEOUT + 1)
        for pid in (server.process.pid, engine):
            os.kill(pid, signal.SIGCONT)
        time.sleep(1)  # for what would replace the engine
        server.wait_until(ready=True)
        completes(server)
        assert engine_pid(server) == engine

    def test_a_stopped_grammar_checker_is_replaced(self, server):
        _, expected = server.post("/v1/completions", GRAMMAR)
        stopped = child_pid(server, "grammar_worker")
        os.kill(stopped, signal.SIGSTOP)
        status, body = server.post("/v1/completions", {**GRAMMAR, "guided_regex": "[a-c]{1,3}"})
        assert status == 200, body
        assert child_pid(server, "grammar_worker") != stopped
        assert server.post("/v1/completions", GRAMMAR)[1]["choices"] == expected["choices"]

    def test_a_stopped_staging_worker_is_replaced(self, server):
        path = str(ADAPTER_PATHS["chinese"])
        assert server.post("/v1/adapters", {"name": "first", "path": path})[0] == 201
        os.kill(child_pid(server, "staging_worker"), signal.SIGSTOP)
        assert server.post("/v1/adapters", {"name": "second", "path": path})[0] == 201
        assert [server.delete(f"/v1/adapters/{name}") for name in ("first", "second")] == [200, 200]


@contextlib.contextmanager
def limited(server: RunningServer, what: int, limit: int, *modules: str) -> Iterator[None]:
    """Lower a limit of the server's process, and of those of modules, while the context lasts."""
    pids = [server.process.pid, *(child_pid(server, module) for module in modules)]
    before = [resource.prlimit(pid, what) for pid in pids]
    for pid, (_, hard) in zip(pids, before, strict=True):
        resource.prlimit(pid, what, (limit, hard))
    try:
        yield
    finally:
        for pid, limits in zip(pids, before, strict=True):
            resource.prlimit(pid, what, limits)


def load(server: RunningServer, name: str, adapter: str = "japanese") -> int:
    """Load an adapter under a new name, and return the status."""
    path = str(ADAPTER_PATHS[adapter])
    return server.post("/v1/adapters", {"name": name, "path": path, "replace": True})[0]


def _served_at_last(server: RunningServer) -> tuple[int, object]:
    """Return the response to a request that is sent until its connection is not closed."""
    while True:
        with contextlib.suppress(OSError):
            return server.post("/v1/completions", SHORT)
        time.sleep(0.05)


def open_files(server: RunningServer) -> int:
    return len(os.listdir(f"/proc/{server.process.pid}/fd"))


class TestResources:
    def test_a_full_disk(self, server):
        """No file may grow: loads end with an error, and everything else is served."""
        server.wait_until(ready=True)
        assert load(server, "before") == 201
        with limited(server, resource.RLIMIT_FSIZE, 0, "staging_worker"):
            assert load(server, "meanwhile") >= 400
            completes(server)
            assert server.is_ready()
        assert server.get("/v1/adapters/meanwhile")[0] == 404
        assert load(server, "meanwhile") == 201

    def test_no_file_descriptors(self, server):
        """A client that is connected is served. New connections wait, or libuv closes them, until
        there are descriptors."""
        server.wait_until(ready=True)
        body, headers = json.dumps(SHORT), {"Content-Type": "application/json"}
        connected = http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=60)
        with contextlib.closing(connected), concurrent.futures.ThreadPoolExecutor(1) as pool:
            connected.request("POST", "/v1/completions", body, headers)
            assert connected.getresponse().read()
            with limited(server, resource.RLIMIT_NOFILE, open_files(server)):
                waiting = pool.submit(_served_at_last, server)
                time.sleep(0.5)
                connected.request("POST", "/v1/completions", body, headers)
                response = connected.getresponse()
                assert (response.status, bool(response.read())) == (200, True)
            assert waiting.result()[0] == 200
        completes(server)
        assert load(server, "after") == 201

    def test_an_engine_that_dies_while_there_are_no_file_descriptors(self, server):
        """Its start is tried again until there are some."""
        server.wait_until(ready=True)
        killed = engine_pid(server)
        with limited(server, resource.RLIMIT_NOFILE, 10):
            os.kill(killed, signal.SIGKILL)
            time.sleep(2)
        server.wait_until(ready=True)
        assert engine_pid(server) != killed
        completes(server)


def test_idle_connections_leave_file_descriptors(tmp_path):
    """Clients that connect and send nothing are disconnected, or wait, and hold up no other."""
    few = (NUM_FEW_FILES, NUM_FEW_FILES)
    lower = functools.partial(resource.setrlimit, resource.RLIMIT_NOFILE, few)
    with serving(tmp_path, preexec_fn=lower) as server, contextlib.ExitStack() as idle:
        ports = (server.http_port, server.grpc_port, server.metrics_port)
        for port in ports * (NUM_FEW_FILES // 2):
            idle.enter_context(socket.create_connection(("127.0.0.1", port)))
        completes(server)
        assert load(server, "meanwhile") == 201
        assert server.post("/v1/completions", {**SHORT, "model": "meanwhile"})[0] == 200
        killed = engine_pid(server)
        os.kill(killed, signal.SIGKILL)
        completes(server)
        assert engine_pid(server) != killed
        assert open_files(server) < NUM_FEW_FILES
        idle.close()
        completes(server)
        assert load(server, "after") == 201
        assert server.stop() == 0


@pytest.mark.parametrize("fault", ["deleted", "read-only"])
def test_a_state_directory_that_goes_away(tmp_path, fault):
    """Requests are served. No load is acknowledged that a restart would lose."""
    state = tmp_path / "state"
    command = [sys.executable, "-m", "loraplex", "serve", str(BASE_PATH), "--name", MODEL]
    # Without packed weights, which are written meanwhile, nothing comes back.
    command += [*PORT_FLAGS, "--state-dir", str(state), "--weights-cache-dir", "none"]
    with running([*_without_root_rights(), *command]) as server:
        assert load(server, "before") == 201
        # An adapter that is in the engine's memory needs no file.
        assert server.post("/v1/completions", {**SHORT, "model": "before"})[0] == 200
        if fault == "deleted":
            shutil.rmtree(state)
        else:
            _set_writable(state, False)
        body = {"name": "meanwhile", "path": str(ADAPTER_PATHS["chinese"])}
        status, reply = server.post("/v1/adapters", body)
        assert (status, reply["error"]["code"]) == (503, "storage_unavailable"), reply
        assert server.get("/v1/adapters/meanwhile")[0] == 404
        if fault == "deleted":
            assert server.delete("/v1/adapters/before") == 503
            assert server.post("/v1/adapters/before/pin", {"pinned": True})[0] == 503
        completes(server)
        assert server.post("/v1/completions", {**SHORT, "model": "before"})[0] == 200
        assert server.is_ready()
        if fault == "read-only":
            _set_writable(state, True)
            assert load(server, "meanwhile", "chinese") == 201
        assert server.stop() == 0


def test_a_full_disk_stores_nothing_and_lets_adapters_be_deleted(tmp_path):
    """A small file system in memory, in a mount namespace of the server."""
    namespace = ["unshare", "-Urm", "sh", "-c"]
    mount = f"mount -t tmpfs -o size=4m tmpfs {tmp_path}"
    if not shutil.which("unshare") or subprocess.run([*namespace, mount], check=False).returncode:
        pytest.skip("no mount namespaces here")
    command = [sys.executable, "-m", "loraplex", "serve", str(BASE_PATH), "--name", MODEL]
    command += [*PORT_FLAGS, "--state-dir", str(tmp_path / "state"), "--weights-cache-dir", "none"]
    with running([*namespace, f'{mount} && exec "$0" "$@"', *command]) as server:
        disk = Path(f"/proc/{server.process.pid}/root{tmp_path}")
        assert load(server, "before") == 201
        files = _files_of(disk)
        with (disk / "filling").open("wb", buffering=0) as filling, contextlib.suppress(OSError):
            while filling.write(bytes(512)):
                pass
        body = {"name": "meanwhile", "path": str(ADAPTER_PATHS["chinese"])}
        status, reply = server.post("/v1/adapters", body)
        assert (status, reply["error"]["code"]) == (507, "storage_full"), reply
        assert _files_of(disk) == files
        completes(server)
        assert server.is_ready()
        assert server.delete("/v1/adapters/before") == 200
        assert server.get("/v1/adapters/before")[0] == 404
        (disk / "filling").unlink()
        assert load(server, "meanwhile", "chinese") == 201
        assert server.stop() == 0


def _files_of(disk: Path) -> set[str]:
    return {str(path.relative_to(disk)) for path in disk.rglob("*") if path.is_file()} - {"filling"}


def _without_root_rights() -> list[str]:
    """Return a prefix of a command that makes root heed the modes of files."""
    if os.geteuid() != 0:
        return []
    drop = ["setpriv", "--inh-caps=-all", "--bounding-set=-dac_override,-dac_read_search"]
    if shutil.which("setpriv") is None or subprocess.run([*drop, "true"], check=False).returncode:
        pytest.skip("root ignores the modes of files, and setpriv cannot change that")
    return drop


def _set_writable(folder: Path, is_writable: bool) -> None:
    for path in (folder, *folder.rglob("*")):
        mode = path.stat().st_mode
        path.chmod(mode | 0o200 if is_writable else mode & ~0o222)
