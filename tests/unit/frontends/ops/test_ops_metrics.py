"""GET /metrics over an EchoService."""

import asyncio

import httpx
import pytest
from prometheus_client import REGISTRY
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from starlette.applications import Starlette

from loraplex.core.principal import LOCAL
from loraplex.core.request import GenerateRequest
from loraplex.core.stats import AdapterTierStats, EngineStats
from loraplex.frontends.ops.metrics import MetricsLimits, metrics_app, metrics_routes
from support.echo_service import EchoService

STATS = EngineStats(
    steps=11,
    step_ns=22_000_000,
    num_running=2,
    num_waiting=3,
    blocks_held=5,
    blocks_cached=7,
    blocks_free=8,
    prompt_tokens=100,
    cached_tokens=40,
    generation_tokens=60,
    preemptions=4,
    blocks_on_host=30,
    draft_tokens=33,
    accepted_tokens=31,
    adapters=AdapterTierStats(
        host_bytes_used=1000,
        host_bytes_total=4000,
        device_pages_used=6,
        device_pages_total=16,
        num_on_host=9,
        num_on_device=3,
        device_hits=21,
        device_misses=22,
        loads=23,
        load_failures=24,
        host_evictions=25,
        device_evictions=26,
        num_held=1,
        host_hits=27,
        host_misses=28,
        copies=29,
    ),
)

EXPECTED = {
    "running_requests": 2,
    "waiting_requests": 3,
    "kv_blocks{held}": 5,
    "kv_blocks{cached}": 7,
    "kv_blocks{free}": 8,
    "kv_cache_usage_ratio": 0.25,
    "kv_host_blocks": 30,
    "draft_tokens_total{accepted}": 31,
    "draft_tokens_total{rejected}": 2,
    "adapter_device_pages{used}": 6,
    "adapter_device_pages{free}": 10,
    "adapter_host_bytes{used}": 1000,
    "adapter_host_bytes{free}": 3000,
    "adapters_resident{device}": 3,
    "adapters_resident{host}": 9,
    "adapters_held": 1,
    "adapter_host_lookups_total{hit}": 27,
    "adapter_host_lookups_total{miss}": 28,
    "adapter_copies_total": 29,
    "engine_steps_total": 11,
    "engine_step_seconds_total": 0.022,
    "preemptions_total": 4,
    "prefix_cache_query_tokens_total": 100,
    "prefix_cache_hit_tokens_total": 40,
    "engine_generation_tokens_total": 60,
    "adapter_cache_lookups_total{hit}": 21,
    "adapter_cache_lookups_total{miss}": 22,
    "adapter_loads_total": 23,
    "adapter_load_failures_total": 24,
    "adapter_evictions_total{device}": 26,
    "adapter_evictions_total{host}": 25,
    "model_ready": 1,
    "adapters_registered": 1,
    "engine_restarts_total{crash}": 2,
    "engine_restarts_total{hang}": 1,
    "engine_restarts_total{kill}": 0,
    "memory_bytes{weights}": 0,
    "memory_bytes{kv_cache}": 0,
    "memory_bytes{adapter_device}": 16 * 2048,
    "memory_bytes{adapter_tables}": 0,
    "memory_bytes{adapter_host}": 1 << 30,
    "adapter_device_bytes{used}": 6 * 2048,
    "adapter_device_bytes{free}": 10 * 2048,
    "adapters_fitting{8}": 10,
    "adapters_fitting{64}": 10,
}


@pytest.fixture
def backend():
    backend = EchoService()
    backend.engine_stats = STATS
    backend.engine_restarts = {"crash": 2, "hang": 1}
    backend.register("fr")
    return backend


@pytest.fixture
def request_metrics(backend):
    return backend.metrics


@pytest.fixture
async def client(backend, request_metrics):
    transport = httpx.ASGITransport(app=metrics_app(backend, request_metrics))
    async with httpx.AsyncClient(transport=transport, base_url="http://ops") as client:
        yield client


async def families(client):
    response = await client.get("/metrics")
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    return list(text_string_to_metric_families(response.text))


async def test_numbers_of_the_engine(client):
    found = {}
    for family in await families(client):
        for sample in family.samples:
            if sample.labels.get("model") == "echo" and "load_seconds" not in sample.name:
                others = [v for k, v in sample.labels.items() if k != "model"]
                suffix = f"{{{others[0]}}}" if others else ""
                found[sample.name.removeprefix("loraplex_") + suffix] = sample.value
    assert found == EXPECTED


async def test_every_metric_has_our_prefix_and_a_help_text(client):
    all_families = await families(client)
    assert len(all_families) > 20
    for family in all_families:
        assert family.name.startswith(("loraplex_", "vllm:"))
        assert family.documentation.endswith(".")


async def test_requests_are_in_the_same_text(client, backend):
    request = GenerateRequest(request_id=1, model="echo", prompt="Hi")
    outputs = await backend.generate(request, LOCAL)
    assert [output async for output in outputs]
    text = (await client.get("/metrics")).text
    expected = 'loraplex_requests_total{adapter="",finish_reason="stop",model="echo"} 1.0'
    assert expected in text
    assert "loraplex_time_to_first_token_seconds_bucket" in text


async def test_a_model_that_is_not_ready(client, backend):
    backend.unready_reason = "starting"
    assert 'loraplex_model_ready{model="echo"} 0.0' in (await client.get("/metrics")).text


async def test_openmetrics_if_requested(client):
    accept = {"accept": "application/openmetrics-text; version=1.0.0"}
    response = await client.get("/metrics", headers=accept)
    assert response.headers["content-type"].startswith("application/openmetrics-text")
    assert response.text.endswith("# EOF\n")


async def test_nothing_is_in_the_default_registry(client):
    await families(client)
    assert not [f for f in REGISTRY.collect() if f.name.startswith("loraplex")]


async def test_only_get(client):
    assert (await client.post("/metrics")).status_code == 405


async def test_engine_without_kv_blocks(client, backend):
    backend.engine_stats = EngineStats()
    assert 'loraplex_kv_cache_usage_ratio{model="echo"} 0.0' in (await client.get("/metrics")).text


def test_a_backend_that_has_not_started_is_not_queried(backend, request_metrics, monkeypatch):
    monkeypatch.setattr(backend, "models", lambda: pytest.fail("asked too early"))
    metrics_app(backend, request_metrics)


class SlowClock:
    """Seconds that pass when a test sets them, and `per_text` while a text is made."""

    def __init__(self) -> None:
        self.now = 100.0
        self.per_text = 0.0

    def __call__(self) -> float:
        return self.now


class Scraper(Collector):
    """Counts the texts that were made."""

    def __init__(self, clock: SlowClock) -> None:
        self._clock = clock
        self.num_texts = 0

    def describe(self):
        return ()

    def collect(self):
        self.num_texts += 1
        self._clock.now += self._clock.per_text
        return ()


@pytest.fixture
def clock():
    return SlowClock()


@pytest.fixture
def scraper(clock):
    return Scraper(clock)


@pytest.fixture
async def scrape(backend, request_metrics, clock, scraper):
    limits = MetricsLimits(cache_seconds=0.04)
    routes = metrics_routes(backend, request_metrics, [scraper], limits=limits, seconds=clock)
    transport = httpx.ASGITransport(app=Starlette(routes=routes))
    async with httpx.AsyncClient(transport=transport, base_url="http://ops") as client:

        async def scrape(accept="text/plain"):
            return (await client.get("/metrics", headers={"accept": accept})).text

        yield scrape


async def test_scrapes_right_after_each_other_share_a_text(scrape, clock, scraper, backend):
    first = await scrape()
    backend.engine_stats = EngineStats(num_running=9)
    assert await scrape() == first
    assert "EOF" in await scrape("application/openmetrics-text")
    assert scraper.num_texts == 2
    clock.now += 0.05
    assert await scrape() != first


async def test_scrapes_at_once_share_a_text(scrape, scraper):
    texts = await asyncio.gather(*(scrape() for _ in range(5)))
    assert len(set(texts)) == scraper.num_texts == 1


async def test_a_text_that_takes_long_is_kept_longer(scrape, clock, scraper):
    clock.per_text = 0.5
    await scrape()
    clock.now += 4.9
    await scrape()
    assert scraper.num_texts == 1
    clock.now += 0.2
    await scrape()
    assert scraper.num_texts == 2


async def test_without_a_cache_each_scrape_makes_its_text(client, backend):
    before = (await client.get("/metrics")).text
    backend.engine_stats = EngineStats(num_running=9)
    assert (await client.get("/metrics")).text != before
