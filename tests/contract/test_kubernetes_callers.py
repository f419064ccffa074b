"""Programs of Kubernetes that manage adapters or read metrics, before an EchoService.

Each fake does what its original does: its requests, its bodies, and the statuses that it takes for
success. Sources: the lora-syncer of the Gateway API inference extension, AIBrix' ModelAdapter
controller, Dynamo's operator, and llm-d's router (docs/plugin-metric-protocol.md).
"""

from collections.abc import Iterator
from unittest.mock import AsyncMock

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.applications import Starlette

from loraplex.core.adapter import Residency
from loraplex.core.errors import InvalidAdapterError
from loraplex.core.principal import LOCAL, NONE, Principal, Rights
from loraplex.core.stats import AdapterActivity, AdapterTierStats, EngineStats
from loraplex.frontends.openai import openai_fallback_routes, openai_routes
from loraplex.frontends.ops.health import health_routes
from loraplex.frontends.ops.metrics import metrics_routes
from loraplex.serving.model_memory import DeviceTier, HostTier, KVMemory, ModelMemory, RankFit
from loraplex.serving.request_metrics import RequestMetrics
from support.echo_service import EchoService
from support.served import served

MEMORY = ModelMemory(
    max_num_seqs=64,
    max_num_batched_tokens=512,
    weights_bytes=1,
    kv=KVMemory(num_bytes=1, block_tokens=16, blocks=60, tokens=640),
    device=DeviceTier(
        num_bytes=1, page_bytes=1, pages=9, fits=(RankFit(rank=8, pages=3, holds=3, more=1),)
    ),
    host=HostTier(num_bytes=1),
)


@pytest.fixture
def backend() -> EchoService:
    backend = EchoService()
    backend.model_memory = MEMORY
    return backend


def authenticate(headers) -> Principal:
    is_reader = headers.get("authorization") == "Bearer reader"
    return Principal(rights=Rights(manage=NONE)) if is_reader else LOCAL


@pytest.fixture
def http(backend: EchoService) -> Iterator[httpx.Client]:
    app = Starlette(routes=metrics_routes(backend, RequestMetrics()))
    app.routes.extend(health_routes(backend, AsyncMock(return_value={})))
    app.routes.extend(openai_routes(backend, authenticate=authenticate))
    app.routes.extend(openai_fallback_routes())
    with served(app) as url, httpx.Client(base_url=url, timeout=60) as client:
        yield client


class LoraSyncer:
    """Compares /v1/models with the adapters of its config map, and loads and unloads them."""

    def __init__(self, http: httpx.Client, base_model: str) -> None:
        self._http = http
        self._base_model = base_model

    def is_healthy(self) -> bool:
        return self._http.get("/health").status_code == 200

    def loaded(self) -> list[str]:
        models = self._http.get("/v1/models").json()["data"]
        return [model["id"] for model in models if model["id"] != self._base_model]

    def load(self, name: str, source: str) -> str | None:
        if name in self.loaded():
            return None
        body = {"lora_name": name, "lora_path": source, "base_model_name": self._base_model}
        response = self._http.post("/v1/load_lora_adapter", json=body)
        return None if response.status_code == 200 else response.text

    def unload(self, name: str) -> str | None:
        body = {"lora_name": name, "base_model_name": self._base_model}
        response = self._http.post("/v1/unload_lora_adapter", json=body)
        return None if response.status_code == 200 else response.text


def test_the_lora_syncer(http: httpx.Client, backend: EchoService):
    syncer = LoraSyncer(http, "echo")
    assert syncer.is_healthy()
    assert syncer.load("fr", "/mnt/lora/fr") is None
    assert syncer.load("fr", "/mnt/lora/fr") is None
    assert syncer.loaded() == ["fr"]
    assert syncer.unload("fr") is None
    assert syncer.loaded() == []
    assert "cannot be found" in (syncer.unload("fr") or "")
    backend.unready_reason = "the engine restarts"
    assert not syncer.is_healthy()


def test_probes_of_a_pod(http: httpx.Client, backend: EchoService):
    """A restarting engine takes the pod out of the service, and does not end it."""
    paths = ("/health/live", "/health/ready", "/health", "/ping")
    assert [http.get(path).status_code for path in paths] == [200, 200, 200, 200]
    backend.unready_reason = "the engine restarts"
    assert [http.get(path).status_code for path in paths] == [200, 503, 503, 503]


class Aibrix:
    """Loads an adapter on each pod, with a key, and looks whether the pod has it."""

    TAKEN = (200, 201)

    def __init__(self, http: httpx.Client) -> None:
        self._http = http
        self._headers = {"Authorization": "Bearer key"}

    def reconcile(self, name: str, artifact: str) -> bool:
        models = self._http.get("/v1/models", headers=self._headers).json()["data"]
        if any(model["id"] == name for model in models):
            return True
        body = {"lora_name": name, "lora_path": artifact}
        response = self._http.post("/v1/load_lora_adapter", json=body, headers=self._headers)
        return response.status_code in self.TAKEN

    def delete(self, name: str) -> bool:
        body = {"lora_name": name}
        response = self._http.post("/v1/unload_lora_adapter", json=body, headers=self._headers)
        return response.status_code in (*self.TAKEN, 404)


def test_aibrix(http: httpx.Client, backend: EchoService):
    controller = Aibrix(http)
    backend.plant_load(InvalidAdapterError("adapter_config.json has no r"))
    assert not controller.reconcile("fr", "org/fr")
    assert controller.reconcile("fr", "org/fr")
    assert controller.reconcile("fr", "org/fr")
    assert controller.delete("fr")
    assert controller.delete("fr")
    assert not backend.adapters(LOCAL)


class DynamoOperator:
    """Sends each DynamoModel of the type lora to the system port of each worker."""

    def __init__(self, http: httpx.Client, key: str = "") -> None:
        self._http = http
        self._headers = {"authorization": f"Bearer {key}"} if key else {}

    def load(self, name: str, uri: str) -> httpx.Response:
        body = {"lora_name": name, "source": {"uri": uri}}
        return self._http.post("/v1/loras", json=body, headers=self._headers)

    def unload(self, name: str) -> httpx.Response:
        return self._http.delete(f"/v1/loras/{name}", headers=self._headers)


def test_dynamo(http: httpx.Client, backend: EchoService):
    operator = DynamoOperator(http)
    first = operator.load("org/fr", "s3://bucket/fr")
    assert first.status_code == 200
    assert operator.load("org/fr", "s3://bucket/fr").json() == first.json()
    number = first.json()["lora_id"]
    assert first.json() == {
        "status": "success",
        "message": "LoRA adapter 'org/fr' loaded successfully",
        "lora_name": "org/fr",
        "lora_id": number,
    }
    operator.load("de", "file:///mnt/lora/de")
    listed = http.get("/v1/loras").json()
    assert (listed["status"], listed["count"]) == ("success", 2)
    assert listed["loras"]["org/fr"] == number
    assert listed["loras"]["de"] != number
    gone = operator.unload("org/fr")
    assert (gone.status_code, gone.json()["lora_id"]) == (200, number)
    assert operator.unload("org/fr").status_code == 404
    assert [card.source for card in backend.adapters(LOCAL)] == ["file:///mnt/lora/de"]


def test_dynamo_has_the_rights_of_its_key(http: httpx.Client, backend: EchoService):
    backend.register("de")
    reader = DynamoOperator(http, "reader")
    assert reader.load("fr", "s3://bucket/fr").status_code == 403
    assert reader.unload("de").status_code == 403
    assert [card.name for card in backend.adapters(LOCAL)] == ["de"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"lora_name": "fr"}, "source"),
        ({"lora_name": "fr", "source": "s3://bucket/fr"}, "source"),
        ({"lora_name": "fr", "source": {}}, "source.uri"),
        ({"source": {"uri": "s3://bucket/fr"}}, "lora_name"),
    ],
)
def test_what_dynamo_must_send(http: httpx.Client, body, param):
    response = http.post("/v1/loras", json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


class LlmdScorers:
    """llm-d's scorers, from one scrape of an endpoint: by activity, and by residency."""

    def __init__(self, http: httpx.Client) -> None:
        families = text_string_to_metric_families(http.get("/metrics").text)
        self._samples = [sample for family in families for sample in family.samples]

    def labels(self, name: str) -> list[dict[str, str]]:
        return [sample.labels for sample in self._samples if sample.name == name and sample.value]

    def value(self, name: str) -> float:
        (value,) = [sample.value for sample in self._samples if sample.name == name]
        return value

    def affinity(self, adapter: str) -> float:
        """Score of the LoRA affinity scorer."""
        (info,) = self.labels("vllm:lora_requests_info")
        active = [name.strip() for name in info["running_lora_adapters"].split(",") if name]
        waiting = [name.strip() for name in info["waiting_lora_adapters"].split(",") if name]
        if adapter in active:
            return 1.0
        if len(active) + len(waiting) < int(info["max_lora"]):
            return 0.8
        return 0.6 if adapter in waiting else 0.0

    def level(self, adapter: str) -> str | None:
        """Best level of a loaded adapter."""
        loaded = self.labels("vllm:lora_adapter_loaded")
        levels = {labels["level"] for labels in loaded if labels["adapter_name"] == adapter}
        return min(levels, default=None, key=("gpu", "cpu").index)


def test_llmds_scorers(http: httpx.Client, backend: EchoService):
    for name in ("fr", "de", "it", "es", "nl"):
        backend.register(name)
    digests = {card.name: card.digest for card in backend.adapters(LOCAL)}
    backend.engine_stats = EngineStats(
        num_running=2, adapters=AdapterTierStats(num_on_device=2, num_on_host=3)
    )
    backend.activity = AdapterActivity(
        residency={
            digests["fr"]: Residency.DEVICE,
            digests["de"]: Residency.DEVICE,
            digests["it"]: Residency.HOST,
            digests["es"]: Residency.LOADING,
        },
        running={digests["fr"]: 2},
        waiting={digests["es"]: 1},
        pinned=(digests["de"],),
    )
    scorers = LlmdScorers(http)
    affinities = {name: scorers.affinity(name) for name in digests}
    assert affinities == {"fr": 1.0, "de": 1.0, "it": 0.0, "es": 0.6, "nl": 0.0}
    levels = {name: scorers.level(name) for name in digests}
    assert levels == {"fr": "gpu", "de": "gpu", "it": "cpu", "es": None, "nl": None}
    pinned = {
        labels["adapter_name"]: labels["pinned"]
        for labels in scorers.labels("vllm:lora_adapter_loaded")
    }
    assert pinned == {"de": "true", "fr": "false", "it": "false"}
    assert scorers.value("vllm:num_gpu_loaded_lora_adapters") == 2
    assert scorers.value("vllm:num_cpu_loaded_lora_adapters") == 3
    assert scorers.value("vllm:max_gpu_lora_adapters") == 3
    (cache,) = scorers.labels("vllm:cache_config_info")
    assert cache == {"model_name": "echo", "block_size": "16", "num_gpu_blocks": "40"}


def test_residency_is_reported_before_an_adapter_is_there(http: httpx.Client):
    scorers = LlmdScorers(http)
    assert scorers.value("vllm:num_gpu_loaded_lora_adapters") == 0
    assert scorers.affinity("fr") == 0.8
