"""POST /v1/adapters with details, before an EchoService."""

from collections.abc import Iterator

import httpx
import pytest
from starlette.applications import Starlette

from loraplex.core.errors import AdapterLoadError, InvalidAdapterError
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
