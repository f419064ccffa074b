"""POST /v1/adapters with details, before an EchoService."""

from collections.abc import Iterator

import httpx
import msgspec
import pytest
from starlette.applications import Starlette

from loraplex.core.errors import (
    AdapterLoadError,
    AdapterNotFoundError,
    InvalidAdapterError,
    PermissionDeniedError,
)
from loraplex.core.principal import LOCAL
from loraplex.core.stats import AdapterActivity, AdapterTierStats
from loraplex.frontends.openai import openai_routes
from support.echo_service import EchoService
from support.served import served

TRIAL = {"name": "zh", "path": "/zh", "dry_run": True, "details": True}


@pytest.fixture
def backend() -> EchoService:
    return EchoService()


@pytest.fixture
def http(backend: EchoService) -> Iterator[httpx.Client]:
    app = Starlette()
    app.routes.extend(openai_routes(backend))
    with served(app) as url, httpx.Client(base_url=url, timeout=60) as client:
        yield client


def test_a_trial_registers_nothing(http: httpx.Client):
    response = http.post("/v1/adapters", json=TRIAL | {"canary": True})
    assert response.status_code == 200, response.text
    trial = response.json()
    assert (trial["object"], trial["ok"], trial["error"]) == ("adapter.trial", True, None)
    assert (trial["changes_base"], trial["fits_now"]) == (True, True)
    assert (trial["adapter"]["name"], trial["adapter"]["dry_run"]) == ("zh", True)
    assert trial["tensors"][0]["module"] == "q_proj"
    assert http.get("/v1/adapters").json()["data"] == []


def test_a_refusal_is_reported_and_without_details_raised(http: httpx.Client, backend: EchoService):
    backend.plant_load(InvalidAdapterError("tensor 'x' is strange"))
    trial = http.post("/v1/adapters", json=TRIAL)
    assert (trial.status_code, trial.json()["ok"], trial.json()["adapter"]) == (200, False, None)
    assert trial.json()["error"] == {"code": "invalid_adapter", "message": "tensor 'x' is strange"}
    assert trial.json()["num_refused"] == 1
    backend.plant_load(InvalidAdapterError("tensor 'x' is strange"))
    assert http.post("/v1/adapters", json=TRIAL | {"details": False}).status_code == 422


def test_errors_that_are_not_about_the_adapter_are_raised(http: httpx.Client, backend: EchoService):
    backend.plant_load(AdapterLoadError("the source does not respond"))
    assert http.post("/v1/adapters", json=TRIAL).status_code == 503
    wrong = http.post("/v1/adapters", json=TRIAL | {"dry_run": False})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "details")


def test_notes_are_apart_from_warnings(http: httpx.Client, backend: EchoService):
    """Descriptions of an adapter have it, with the base that it names."""
    rounding = "tensors in F32 are rounded to the bfloat16 that this server computes in"
    other = "trained on 'qwen3'; this server runs 'echo'"
    backend.staging.remarks, backend.staging.trained_on = (rounding, other), "qwen3"
    trial = http.post("/v1/adapters", json=TRIAL).json()
    loaded = http.post("/v1/adapters", json={"name": "zh", "path": "/zh"}).json()
    backend.staging.remarks, backend.staging.trained_on = (rounding,), None
    http.post("/v1/adapters", json={"name": "ja", "path": "/ja"})
    [ja, zh] = http.get("/v1/adapters").json()["data"]
    shown = http.get("/v1/adapters/zh").json()
    paged = http.get("/v1/adapters", params={"has_warnings": "true"}).json()["data"]
    for card in (trial["adapter"], loaded, zh, shown, *paged):
        assert (card["warnings"], card["notes"], card["declared_base"]) == (
            [other],
            [rounding],
            "qwen3",
        )
        assert card["warning_codes"] == ["other_base"]
    assert [card["name"] for card in paged] == ["zh"]
    assert (ja["warnings"], ja["notes"], ja["declared_base"]) == ([], [rounding], None)
    assert trial["declared_base"] == "qwen3"
    backend.staging.trained_on = "qwen3"
    backend.plant_load(InvalidAdapterError("tensor 'x' is strange"))
    refused = http.post("/v1/adapters", json=TRIAL | {"replace": True}).json()
    assert (refused["adapter"], refused["declared_base"]) == (None, "qwen3")


def test_what_a_load_replaces_and_what_it_evicts(http: httpx.Client, backend: EchoService):
    assert http.post("/v1/adapters", json=TRIAL).json()["replaces"] is None
    for name in ("zh", "fr", "de"):
        backend.register(name)
    digests = {card.name: card.digest for card in backend.adapters(LOCAL)}
    backend.activity = AdapterActivity(leaving={"gone": 1, digests["de"]: 1, digests["fr"]: 1})
    trial = http.post("/v1/adapters", json=TRIAL | {"replace": True}).json()
    assert trial["replaces"] == {"version": 1, "rank": 8, "num_running": 0}
    assert (trial["fits_now"], trial["evicts"]) == (True, [])
    pages = backend.model("echo").engine.capacity.num_adapter_pages
    for used, evicted in (pages, []), (pages + 1, ["de"]), (pages + 2, ["de", "fr"]):
        # One page is wanted. The first to leave has no name any longer.
        tiers = AdapterTierStats(device_pages_used=used)
        backend.engine_stats = msgspec.structs.replace(backend.engine_stats, adapters=tiers)
        trial = http.post("/v1/adapters", json=TRIAL | {"replace": True}).json()
        assert (trial["fits_now"], trial["evicts"]) == (False, evicted)
    backend.plant_load(InvalidAdapterError("tensor 'x' is strange"))
    refused = http.post("/v1/adapters", json=TRIAL | {"replace": True}).json()
    assert (refused["evicts"], refused["replaces"]["version"]) == ([], 1)


@pytest.mark.parametrize(
    ("route", "body", "field"),
    [
        ("/v1/adapters", {"name": "fr", "source": "/x"}, "source"),
        ("/v1/adapters", {"name": "fr", "path": "/x", "dry_run": True, "details": True}, "source"),
        ("/v1/load_lora_adapter", {"lora_name": "fr", "lora_path": "/x"}, "lora_path"),
        ("/v1/loras", {"lora_name": "fr", "source": {"uri": "/x"}}, "source.uri"),
    ],
)
def test_an_error_names_the_field_that_has_the_source(
    http: httpx.Client, backend: EchoService, route: str, body: dict, field: str
):
    backend.plant_load(PermissionDeniedError("/x is outside the folders", param="path"))
    response = http.post(route, json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (403, field)
    assert backend.adapters(LOCAL) == []


@pytest.mark.parametrize(("field", "value"), [("model", "fr"), ("adapters", ["fr"])])
def test_an_error_names_the_field_that_has_the_adapter(
    http: httpx.Client, backend: EchoService, field: str, value: str | list[str]
):
    """The adapter is there when the request is read, and its folder is broken."""
    backend.register("fr")
    backend.plant(AdapterNotFoundError("adapter 'fr' could not be loaded", param="adapter"))
    response = http.post("/v1/completions", json={"prompt": "hi", field: value})
    assert (response.status_code, response.json()["error"]["param"]) == (404, field)
