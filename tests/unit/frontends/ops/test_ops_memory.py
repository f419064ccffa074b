"""Memory, load times and the gateway's gauges, over an EchoService."""

import time
from unittest.mock import AsyncMock

import httpx
import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.applications import Starlette

from loraplex.core.adapter import Residency
from loraplex.core.principal import LOCAL
from loraplex.core.stats import AdapterActivity, AdapterTierStats, Durations, EngineStats
from loraplex.frontends.ops.health import health_routes
from loraplex.frontends.ops.metrics import MetricsLimits, metrics_routes
from loraplex.serving.model_memory import (
    AcceleratorMemory,
    DeviceTier,
    HostTier,
    KVMemory,
    ModelMemory,
    RankFit,
)
from loraplex.serving.request_metrics import RequestMetrics
from support.echo_service import EchoService

MEMORY = ModelMemory(
    max_num_seqs=64,
    max_num_batched_tokens=512,
    weights_bytes=100,
    kv=KVMemory(num_bytes=200, block_tokens=16, blocks=4, tokens=64, free=4),
    device=DeviceTier(
        num_bytes=300,
        page_bytes=30,
        pages=10,
        table_bytes=30,
        pages_used=4,
        adapters=2,
        fits=(RankFit(rank=8, pages=2, holds=5, more=3),),
    ),
    host=HostTier(num_bytes=400, bytes_used=40, adapters=3),
)
TIMES = Durations().with_one(400_000).with_one(2_000_000_000)


@pytest.fixture
def backend():
    backend = EchoService()
    backend.model_memory = MEMORY
    backend.engine_stats = EngineStats(
        num_running=3,
        num_waiting=2,
        blocks_held=1,
        blocks_free=3,
        adapters=AdapterTierStats(read_times=TIMES),
    )
    for name in ("fr", "de", "it", "es", "a,b"):
        backend.register(name)
    return backend


@pytest.fixture
async def client(backend):
    app = Starlette(
        routes=[
            *metrics_routes(backend, RequestMetrics()),
            *health_routes(backend, AsyncMock(return_value={})),
        ]
    )
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://ops") as client:
        yield client


async def samples(client):
    text = (await client.get("/metrics")).text
    return [s for family in text_string_to_metric_families(text) for s in family.samples]


async def values(client, name, *labels):
    return {
        tuple(sample.labels[label] for label in labels): sample.value
        for sample in await samples(client)
        if sample.name == name
    }


async def test_memory_as_json(client):
    body = (await client.get("/v1/memory")).json()
    assert list(body) == ["echo"]
    assert body["echo"]["weights_bytes"] == 100
    assert body["echo"]["device"]["fits"] == [{"rank": 8, "pages": 2, "holds": 5, "more": 3}]
    assert body["echo"]["store"] == {"adapters": 5, "files": 0, "num_bytes": 0}
    assert (await client.get("/v1/memory?model=echo")).json() == body


async def test_memory_of_what_is_not_there(client, backend):
    assert (await client.get("/v1/memory?model=nope")).status_code == 404
    backend.model_memory = None
    backend.forget_engines()
    assert (await client.get("/v1/memory")).status_code == 503
    assert (await client.get("/metrics")).status_code == 200


async def test_memory_as_gauges(client):
    assert await values(client, "loraplex_memory_bytes", "part") == {
        ("weights",): 100,
        ("kv_cache",): 200,
        ("adapter_device",): 300,
        ("adapter_tables",): 30,
        ("adapter_host",): 400,
    }
    assert await values(client, "loraplex_adapter_device_bytes", "state") == {
        ("used",): 120,
        ("free",): 180,
    }
    assert await values(client, "loraplex_adapters_fitting", "rank") == {("8",): 3}


async def test_the_memory_of_an_accelerator(client, backend):
    assert await values(client, "loraplex_accelerator_bytes", "state") == {}
    backend.model_memory = msgspec.structs.replace(
        MEMORY,
        workspace_bytes=50,
        graph_bytes=60,
        accelerator=AcceleratorMemory(total=2000, free=70, other=80),
    )
    found = await values(client, "loraplex_memory_bytes", "part")
    assert (found[("workspace",)], found[("graphs",)]) == (50, 60)
    assert await values(client, "loraplex_accelerator_bytes", "state") == {
        ("total",): 2000,
        ("free",): 70,
        ("other",): 80,
    }
    body = (await client.get("/v1/memory")).json()["echo"]
    assert (body["workspace_bytes"], body["graph_bytes"]) == (50, 60)
    assert body["accelerator"] == {"total": 2000, "free": 70, "other": 80}


async def test_load_seconds(client):
    found = await values(client, "loraplex_adapter_load_seconds_bucket", "stage", "le")
    assert found["read", "0.0005"] == found["read", "1.0"] == 1
    assert found["read", "2.5"] == found["read", "+Inf"] == 2
    sums = await values(client, "loraplex_adapter_load_seconds_sum", "stage")
    assert sums == {("copy",): 0, ("read",): pytest.approx(2.0004)}


async def test_the_gateways_gauges(client):
    for name, value in (
        ("vllm:num_requests_running", 3),
        ("vllm:num_requests_waiting", 2),
        ("vllm:kv_cache_usage_perc", 0.25),
        ("vllm:gpu_cache_usage_perc", 0.25),
    ):
        assert await values(client, name, "model_name") == {("echo",): value}


async def test_lora_requests_info(client, backend):
    digests = {card.name: card.digest for card in backend.adapters(LOCAL)}
    backend.activity = AdapterActivity(
        residency={
            digests["fr"]: Residency.DEVICE,
            digests["de"]: Residency.DEVICE,
            digests["a,b"]: Residency.DEVICE,
            digests["it"]: Residency.LOADING,
        },
        running={digests["fr"]: 2},
        waiting={digests["fr"]: 1, digests["it"]: 1},
    )
    (sample,) = [s for s in await samples(client) if s.name == "vllm:lora_requests_info"]
    assert sample.labels == {
        "max_lora": "5",
        "running_lora_adapters": "de,fr",
        "waiting_lora_adapters": "it",
    }
    assert sample.value == pytest.approx(time.time(), abs=60)


async def test_gateways_name_a_limited_number_of_adapters(backend):
    """Pinned adapters first, then those in use, then those on the device."""
    digests = {card.name: card.digest for card in backend.adapters(LOCAL)}
    backend.activity = AdapterActivity(
        residency={
            digests["de"]: Residency.DEVICE,
            digests["fr"]: Residency.DEVICE,
            digests["es"]: Residency.HOST,
            digests["it"]: Residency.HOST,
        },
        running={digests["it"]: 1},
        waiting={digests["it"]: 1, digests["es"]: 1, digests["a,b"]: 1},
        pinned=(digests["fr"],),
    )
    routes = metrics_routes(
        backend, RequestMetrics(), limits=MetricsLimits(cache_seconds=0, max_adapters=2)
    )
    transport = httpx.ASGITransport(app=Starlette(routes=routes))
    async with httpx.AsyncClient(transport=transport, base_url="http://ops") as client:
        loaded = await values(client, "vllm:lora_adapter_loaded", "adapter_name", "level", "pinned")
        assert set(loaded) == {("fr", "gpu", "true"), ("es", "cpu", "false")}
        info = await values(client, "vllm:lora_requests_info", "running_lora_adapters")
        assert set(info) == {("de,fr",)}
        waiting = await values(client, "vllm:lora_requests_info", "waiting_lora_adapters")
        assert set(waiting) == {("es,it",)}
