"""GET /v1/history over an EchoService, and the numbers of its points."""

import asyncio

import httpx
import msgspec
import pytest
from starlette.applications import Starlette

from loraplex.core.plan import StepTiming
from loraplex.core.principal import Principal, Rights
from loraplex.core.stats import AdapterTierStats, StepRecord
from loraplex.frontends.access import everyone_is_local
from loraplex.frontends.ops.history import MAX_SECONDS, STEP_SECONDS, History, history_route
from loraplex.frontends.ops.latencies import Latencies
from loraplex.serving.adapter_usage import UsedAdapter
from loraplex.serving.request_metrics import RequestMetrics
from support.echo_service import EchoService

START = 1_000_000.0


class Recorded:
    """A history of two models, whose wall clock the test moves."""

    def __init__(self):
        self.now = START
        self.backend = EchoService(("one", "two"))
        self.metrics = RequestMetrics()
        self.history = History(self.backend, Latencies(self.metrics), lambda: self.now)

    async def step(self, **stats):
        """Let two seconds pass, and the engines report these numbers."""
        self.now += STEP_SECONDS
        self.backend.engine_stats = msgspec.structs.replace(self.backend.engine_stats, **stats)
        await self.history.record()

    @property
    def points(self):
        return self.history.of("one", MAX_SECONDS).points

    async def get(self, authenticate=everyone_is_local, **query):
        app = Starlette(routes=[history_route(self.backend, self.history, authenticate)])
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://ops") as client:
            return await client.get("/v1/history", params=query)


@pytest.fixture
def recorded():
    return Recorded()


def record(start_ns: int, lora_ns: int | None = None, **fields) -> StepRecord:
    needed = [field.name for field in msgspec.structs.fields(StepRecord) if field.required]
    numbers = dict.fromkeys(needed, 0) | {"start_ns": start_ns, "duration_ns": 100} | fields
    return StepRecord(**numbers, timing=StepTiming(lora_ns=lora_ns))


async def test_points_count_what_is_new(recorded):
    await recorded.step(prompt_tokens=10, generation_tokens=4)
    await recorded.step(prompt_tokens=10, generation_tokens=9)
    await recorded.step()
    assert [(p.prompt_tokens, p.output_tokens) for p in recorded.points] == [
        (10, 4),
        (0, 5),
        (0, 0),
    ]
    assert [p.t - START for p in recorded.points] == [2.0, 4.0, 6.0]


async def test_a_new_engine_counts_from_zero_again(recorded):
    await recorded.step(prompt_tokens=10, generation_tokens=40)
    recorded.backend.engine_restarts = {"crash": 1}
    await recorded.step(prompt_tokens=11, generation_tokens=3)
    await recorded.step(prompt_tokens=12, generation_tokens=3)
    assert [(p.prompt_tokens, p.output_tokens) for p in recorded.points] == [
        (10, 40),
        (11, 3),
        (1, 0),
    ]
    assert [p.restarts for p in recorded.points] == [0, 1, 0]


async def test_a_peak_between_two_points_is_seen(recorded):
    """The last report of an engine that is idle again has nothing of what it did before."""
    recorded.backend.step_records = [
        record(1, num_running=3, num_waiting=2, blocks_held=7, adapter_pages_used=4),
        record(2, num_running=1, blocks_held=2),
    ]
    tiers = AdapterTierStats(device_pages_used=1)
    await recorded.step(blocks_cached=5, adapters=tiers)
    recorded.backend.step_records = [*recorded.backend.step_records, record(3, num_running=2)]
    await recorded.step(blocks_held=1)
    first, second = recorded.points
    assert (first.running, first.waiting, first.kv_held, first.pages_used) == (3, 2, 7, 4)
    assert (second.running, second.waiting, second.kv_held, second.pages_used) == (2, 0, 1, 1)
    assert (first.kv_cached, second.kv_cached) == (5, 5)


async def test_the_share_of_lora(recorded):
    recorded.backend.step_records = [record(1, 5), record(2, 20), record(3)]
    await recorded.step()
    await recorded.step()
    assert [p.lora_share for p in recorded.points] == [0.125, None]


async def test_latencies_are_counted_by_point(recorded):
    recorded.metrics.time_to_first_token.labels("one").observe(0.0005)
    await recorded.step()
    await recorded.step()
    recorded.metrics.time_to_first_token.labels("one").observe(0.0005)
    recorded.metrics.e2e_latency.labels("one").observe(1e9)
    recorded.metrics.inter_token_latency.labels("two").observe(0.1)
    await recorded.step()
    first, second, third = recorded.points
    assert (first.ttft[0], sum(first.ttft)) == (1, 1)
    assert (second.ttft, second.itl, second.e2e) == ((), (), ())
    assert (third.ttft[0], third.e2e[-1], third.itl) == (1, 1, ())
    assert sum(recorded.history.of("two", MAX_SECONDS).points[-1].itl) == 1


async def test_memory_is_bounded(recorded):
    for _ in range(MAX_SECONDS // STEP_SECONDS + 10):
        await recorded.step()
    assert len(recorded.points) == MAX_SECONDS // STEP_SECONDS
    assert recorded.points[-1].t == recorded.now
    assert len(recorded.history.of("one", 60).points) == 30


async def test_a_fault_costs_one_point(recorded, monkeypatch, caplog):
    faults = [OSError("a process is gone")]
    refresh = recorded.history._latencies.refresh

    async def fail_once():
        if faults:
            raise faults.pop()
        await refresh()

    monkeypatch.setattr(recorded.history._latencies, "refresh", fail_once)
    following = asyncio.create_task(recorded.history.follow(0))
    async with asyncio.timeout(60):
        while not recorded.points:
            await asyncio.sleep(0)
    following.cancel()
    assert "a process is gone" in caplog.text


async def test_the_response(recorded):
    await recorded.step(prompt_tokens=3)
    body = (await recorded.get()).json()
    assert (body["model"], body["step_seconds"], body["last_request"]) == ("one", 2, None)
    assert body["points"][0]["prompt_tokens"] == 3
    bounds = body["latency_bounds"]["time_to_first_token"]
    recorded.metrics.time_to_first_token.labels("one").observe(0.0005)
    recorded.backend.adapter_usage.count("t", [UsedAdapter("one"), UsedAdapter("one", "t", "a")])
    await recorded.step()
    body = (await recorded.get(model="one", seconds="2")).json()
    [point] = body["points"]
    assert len(point["ttft"]) == len(bounds) + 1
    assert (
        body["last_request"]
        == recorded.backend.adapter_usage.of_tenant("t")[UsedAdapter("one")].last_used
    )
    assert (await recorded.get(model="two")).json()["last_request"] is None


async def test_the_capacity_is_known_once_the_engine_was_there(recorded):
    memory = recorded.backend.model("one").memory()
    assert (await recorded.get()).json()["capacity"] == {
        "kv_blocks": memory.kv.blocks,
        "adapter_pages": memory.device.pages,
        "max_num_seqs": memory.max_num_seqs,
    }
    recorded.backend.forget_engines()
    assert (await recorded.get()).json()["capacity"] is None


@pytest.mark.parametrize(
    ("query", "status", "param"),
    [
        ({"seconds": "0"}, 400, "seconds"),
        ({"seconds": "901"}, 400, "seconds"),
        ({"seconds": "-1"}, 400, "seconds"),
        ({"model": "three"}, 404, "model"),
    ],
)
async def test_bad_queries(recorded, query, status, param):
    response = await recorded.get(**query)
    assert (response.status_code, response.json()["error"]["param"]) == (status, param)


async def test_only_operators_see_it(recorded):
    response = await recorded.get(lambda headers: Principal("acme", Rights(operator=False)))
    assert response.status_code == 403
    assert "acme" in response.text
