"""Health, iterations and statistics over an EchoService."""

import json
import re
import time

import httpx
import pytest
from msgspec import structs
from starlette.applications import Starlette

from loraplex.core import errors
from loraplex.core.clock import SystemClock
from loraplex.core.stats import AdapterActivity, EngineStats, StepRecord
from loraplex.core.version import __version__
from loraplex.frontends.ops import responses
from loraplex.frontends.ops.health import health_routes
from loraplex.frontends.ops.latencies import Latencies
from loraplex.frontends.ops.stats import ServerStats
from loraplex.frontends.telemetry.connections import HttpConnections
from loraplex.frontends.telemetry.telemetry import Telemetry
from loraplex.serving.backend import Health
from loraplex.serving.draining import Draining
from loraplex.serving.request_metrics import RequestMetrics
from support.echo_service import EchoService
from support.naming import naming


def record(step_id: int) -> StepRecord:
    return StepRecord(
        step_id=step_id,
        start_ns=step_id * 10,
        duration_ns=5,
        num_rows=1,
        num_prefill_rows=0,
        num_tokens=1,
        num_adapters=0,
        num_running=1,
        num_waiting=0,
        num_preempted=0,
        blocks_held=1,
        blocks_cached=0,
        blocks_free=9,
        adapter_pages_used=0,
        adapter_copies_started=0,
        request_ids=(7,),
    )


def stats_of(backend):
    draining = Draining(SystemClock(), lambda: 3, lambda error: None)
    latencies = Latencies(RequestMetrics())
    return ServerStats(backend, Telemetry(), draining, HttpConnections(), latencies).report


@pytest.fixture
def backend():
    backend = EchoService(("one", "two"))
    backend.step_records = [record(step_id) for step_id in range(150)]
    backend.engine_stats = EngineStats(steps=150)
    return backend


@pytest.fixture
async def client(backend):
    transport = httpx.ASGITransport(app=Starlette(routes=health_routes(backend, stats_of(backend))))
    async with httpx.AsyncClient(transport=transport, base_url="http://ops") as client:
        yield client


async def test_live_and_ready(client):
    response = await client.get("/health/live")
    assert (response.status_code, response.json()) == (200, {"live": True})
    response = await client.get("/health/ready")
    assert (response.status_code, response.json()) == (200, {"ready": True, "reason": ""})
    assert response.headers["content-type"] == "application/json"


async def test_live_but_not_ready(client, backend):
    backend.draining.close()
    assert (await client.get("/health/live")).status_code == 200
    response = await client.get("/health/ready")
    assert response.status_code == 503
    assert response.json() == {"ready": False, "reason": "the server is stopping"}


async def test_not_live(client, backend, monkeypatch):
    monkeypatch.setattr(backend, "health", lambda: Health(live=False, ready=False))
    response = await client.get("/health/live")
    assert (response.status_code, response.json()) == (503, {"live": False})


async def test_iterations(client):
    steps = (await client.get("/v1/iterations")).json()
    assert [step["step_id"] for step in steps] == list(range(50, 150))
    steps = (await client.get("/v1/iterations?model=two&limit=2")).json()
    assert [step["step_id"] for step in steps] == [148, 149]
    assert steps[0]["request_ids"] == [7]
    assert steps[0]["blocks_free"] == 9


async def test_iterations_as_lines(client):
    response = await client.get(
        "/v1/iterations?limit=3", headers={"accept": "application/x-ndjson, */*"}
    )
    assert response.headers["content-type"] == "application/x-ndjson"
    steps = [json.loads(line) for line in response.text.splitlines()]
    assert [step["step_id"] for step in steps] == [147, 148, 149]
    assert steps == (await client.get("/v1/iterations?limit=3")).json()


async def test_steps_after_a_time(client):
    before_ns, before_unix_ns = time.monotonic_ns(), time.time_ns()
    body = (await client.get("/v1/iterations?after_ns=1480")).json()
    assert [step["step_id"] for step in body["data"]] == [149]
    assert before_ns <= body["now_ns"] <= time.monotonic_ns()
    assert before_unix_ns <= body["unix_ns"] <= time.time_ns()
    nothing = (await client.get("/v1/iterations?after_ns=1490")).json()
    assert nothing["data"] == []
    lines = {"accept": "application/x-ndjson"}
    assert (await client.get("/v1/iterations?after_ns=1490", headers=lines)).content == b""


async def test_a_viewer_loses_and_doubles_no_step_when_the_engine_begins_anew(client, backend):
    seen, after_ns = [], 0
    for poll in range(40):
        url = f"/v1/iterations?after_ns={after_ns}&limit=7"
        steps = (await client.get(url)).json()["data"]
        assert len(steps) <= 7
        seen += [step["start_ns"] for step in steps]
        after_ns = seen[-1]
        if poll == 5:
            anew = [structs.replace(record(1 + i), start_ns=5000 + i) for i in range(60)]
            backend.step_records += anew
    assert seen == [one.start_ns for one in backend.step_records[1:]]


@pytest.mark.parametrize("after_ns", ["-1", "x", "1.5", "", "9" * 19, "9" * 5000])
async def test_bad_times(client, after_ns):
    response = await client.get("/v1/iterations", params={"after_ns": after_ns})
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["code"], error["param"]) == ("invalid_parameter", "after_ns")
    assert re.search(naming("[0, 9223372036854775807]", "after_ns"), error["message"])


@pytest.mark.parametrize("limit", ["0", "-1", "10001", "x", "1.5", "", "٣", "9" * 5000])
async def test_bad_limits(client, limit):
    response = await client.get("/v1/iterations", params={"limit": limit})
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["code"], error["param"]) == ("invalid_parameter", "limit")
    assert re.search(naming("[1, 10000]"), error["message"])


@pytest.mark.parametrize("path", ["/v1/iterations", "/v1/internal/stats"])
async def test_unknown_model(client, path):
    response = await client.get(path, params={"model": "three"})
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"


async def test_stats(client):
    body = (await client.get("/v1/internal/stats")).json()
    assert (body["version"], body["ready"]) == (__version__, True)
    assert body["drain"]["in_work"] == 3
    assert (body["tenants"], body["open_requests"]) == ({}, {})
    assert list(body["models"]) == ["one", "two"]
    assert body["models"]["one"]["engine"]["steps"] == 150
    assert body["models"]["one"]["engine"]["adapters"]["host_bytes_total"] == 0
    assert sum(body["models"]["one"]["latencies"]["e2e_latency"]) == 0
    one = (await client.get("/v1/internal/stats?model=two")).json()
    assert list(one["models"]) == ["two"]


async def test_waiting_sequences_are_queried_once_for_many_viewers(backend, monkeypatch):
    now, queries = [0.0], []
    waiting = {f"d{i}": 1 for i in range(40)} | {"most": 5}

    async def activity():
        queries.append(now[0])
        return AdapterActivity(waiting=waiting)

    monkeypatch.setattr(backend.model("one"), "adapter_activity", activity)
    draining = Draining(SystemClock(), lambda: 0, print)
    parts = (backend, Telemetry(), draining, HttpConnections(), Latencies(RequestMetrics()))
    stats = ServerStats(*parts, seconds=lambda: now[0])
    assert (await stats.report(["one"])).models["one"].waiting == {}
    assert queries == [], "nothing waits"
    backend.engine_stats = EngineStats(num_waiting=45)
    for now[0] in (1.0, 1.1, 1.3, 1.5):
        reported = (await stats.report(["one"])).models["one"].waiting
        assert (reported["most"], len(reported)) == (5, 32)
    assert queries == [1.0, 1.5]


async def test_every_error_has_a_status(client, backend, monkeypatch):
    for leaf in errors.leaves():
        error = leaf("no")
        monkeypatch.setattr(backend.model("one"), "steps", lambda *a, error=error: _raise(error))
        response = await client.get("/v1/iterations")
        assert response.status_code in {status for _, status in responses.STATUSES}
        assert response.json()["error"]["message"] == "no"
        is_clients = isinstance(error, errors.RequestError | errors.RateLimitedError)
        assert (response.status_code < 500) == is_clients
    assert responses.STATUSES[-1][0] is errors.LoraplexError


def _raise(error: Exception) -> None:
    raise error
