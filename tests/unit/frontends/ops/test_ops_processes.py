"""GET /v1/processes: the tree of processes, and the engines."""

import contextlib
import os
import signal
import subprocess
import sys

import httpx
import pytest

from loraplex.frontends.access import by_api_key
from loraplex.frontends.ops.processes import process_tree
from loraplex.serving.access.api_key_ring import ApiKeys
from loraplex.serving.access.api_keys import new_key
from support.described_app import described_app
from support.echo_service import EchoService
from support.eventually import eventually
from support.scripted_engine import record_of

PROGRAM = (
    "import subprocess, sys\n"
    "subprocess.run([sys.executable, '-c', 'input()', 'loraplex.app.engine_process'])\n"
)


@contextlib.contextmanager
def grandchild():
    """Run a process that runs one like an engine."""
    process = subprocess.Popen([sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE)
    try:
        yield process
    finally:
        process.stdin.close()
        process.wait()


def kinds(pid):
    return [entry.kind for entry in process_tree(pid)]


def test_the_tree_of_a_process():
    with grandchild() as process:
        assert eventually(lambda: kinds(process.pid) == ["server", "engine"])
        first, engine = process_tree(process.pid)
        assert (first.pid, first.parent, engine.parent) == (process.pid, os.getpid(), process.pid)
        # At first it is a copy that has not begun its program.
        assert eventually(lambda: (process_tree(process.pid)[1].memory_bytes or 0) > 1 << 20)
        assert 0 <= engine.uptime_seconds < 600
        assert engine.cpu_seconds >= 0
        assert engine.threads == 1
        os.kill(engine.pid, signal.SIGSTOP)
        assert eventually(lambda: process_tree(process.pid)[1].state == "stopped")
        os.kill(engine.pid, signal.SIGCONT)
    assert process_tree(process.pid)[0].memory_bytes is None


@pytest.mark.parametrize("has_steps", [True, False])
async def test_engines_for_operators(has_steps):
    operator, tenant = new_key(), new_key()
    backend = EchoService()
    backend.engine_restarts = {"crash": 2}
    if has_steps:
        backend.step_records = [record_of(start_ns=1, duration_ns=1)]
    app = described_app(backend, by_api_key(ApiKeys(None, f"{operator} acme:{tenant}")))
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://testserver") as client:
        for key, status in ((tenant, 403), (operator, 200)):
            headers = {"authorization": f"Bearer {key}"}
            response = await client.get("/v1/processes", headers=headers)
            assert response.status_code == status
    body = response.json()
    assert body["processes"][0]["pid"] == os.getpid()
    engine = body["engines"]["echo"]
    assert (engine["ready"], engine["restarts"]) == (True, {"crash": 2, "hang": 0, "kill": 0})
    assert (engine["last_step_seconds"] is not None) == has_steps
    assert body["frontend_restarts"] == {}
