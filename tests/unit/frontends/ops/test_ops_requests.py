"""GET /v1/requests over HTTP, for tenants and operators."""

import re

import httpx
import pytest

from loraplex.core.server_config import ServerConfig
from loraplex.frontends.access import by_api_key
from loraplex.serving.access.api_key_ring import ApiKeys
from loraplex.serving.access.api_keys import new_key
from support.described_app import described_app
from support.echo_service import EchoService
from support.naming import naming

KEYS = {name: new_key() for name in ("default", "acme", "other")}


@pytest.fixture
async def client():
    ring = ApiKeys(None, " ".join(f"{name}:{key}" for name, key in KEYS.items()))
    backend = EchoService()
    backend.register("zh")
    settings = ServerConfig(recent_requests=50)
    app = described_app(backend, by_api_key(ring), settings)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://testserver") as client:
        yield client


def bearer(tenant):
    return {"authorization": f"Bearer {KEYS[tenant]}"}


async def complete(client, tenant, model="echo", status=200):
    body = {"model": model, "prompt": "hello", "max_tokens": 3}
    response = await client.post("/v1/completions", json=body, headers=bearer(tenant))
    assert response.status_code == status


async def recent(client, key, expected=200, **query):
    response = await client.get("/v1/requests", params=query, headers=bearer(key))
    assert response.status_code == expected
    return response.json()


async def test_a_tenant_sees_its_own(client):
    await complete(client, "acme", "zh")
    await complete(client, "other")
    found = await recent(client, "acme")
    (one,) = found["requests"]
    assert (one["tenant"], one["status"], one["completion_tokens"]) == ("acme", 200, 3)
    assert one["generations"][0]["adapters"][0]["name"] == "zh"
    assert one["route"] == "/v1/completions"
    assert found["is_complete"]
    assert (await recent(client, "acme", tenant="acme"))["requests"] == [one]
    refused = await recent(client, "acme", 403, tenant="other")
    assert re.search(naming("acme", "operator"), refused["error"]["message"])


async def test_operators_choose(client):
    await complete(client, "acme")
    await complete(client, "other")
    both = await recent(client, "default")
    assert [one["tenant"] for one in both["requests"]] == ["acme", "other"]
    one = await recent(client, "default", tenant="other")
    assert [one["tenant"] for one in one["requests"]] == ["other"]


async def test_why_a_request_failed(client):
    """And which adapter the routes of adapters were about."""
    await complete(client, "default", "zz", 404)
    body = {"name": "mine", "path": "/mine"}
    await client.post("/v1/adapters", json=body, headers=bearer("default"))
    await client.get("/v1/adapters/mine", headers=bearer("default"))
    await client.get("/v1/adapters/no", headers=bearer("default"))
    await client.post(
        "/v1/load_lora_adapter",
        json={"lora_name": "his", "lora_path": "/his"},
        headers=bearer("default"),
    )
    await client.delete("/v1/adapters/mine", headers=bearer("default"))
    failed, *others = (await recent(client, "default"))["requests"]
    assert (failed["kind"], failed["subject"], failed["status"]) == ("generation", None, 404)
    assert "'zz'" in failed["message"]
    assert [(one["subject"], one["status"], one["model"]) for one in others] == [
        ("mine", 201, "echo"),
        ("no", 404, None),
        ("his", 200, "echo"),
        ("mine", 200, "echo"),
    ]
    assert (await recent(client, "default", kind="adapter"))["requests"] == others
    found = (await recent(client, "default", kind="adapter", model="echo"))["requests"]
    assert [one["subject"] for one in found] == ["mine", "his", "mine"]
    assert (await recent(client, "default", kind="generation"))["requests"] == [failed]
    assert len((await recent(client, "default", adapter="mine"))["requests"]) == 2
    assert (await recent(client, "default", model="other"))["requests"] == []


async def test_a_poll_gets_each_request_once(client):
    cursor, seen = (await recent(client, "acme"))["next"], []
    for _ in range(3):
        await complete(client, "acme")
        await complete(client, "acme", "no", 404)
        for _ in range(3):
            found = await recent(client, "acme", after=cursor, limit=1)
            cursor = found["next"]
            seen += [one["status"] for one in found["requests"]]
    assert seen == [200, 404] * 3


@pytest.mark.parametrize(
    ("query", "named"),
    [
        ({"limit": 0}, ("limit", "[1, 1000]", 0)),
        ({"after": "x"}, ("after", "'x'")),
        ({"adapter": "x" * 257}, ("adapter", 256)),
        ({"model": "x" * 257}, ("model", 256)),
        ({"kind": "x"}, ("kind", "generation", "adapter", "'x'")),
    ],
)
async def test_wrong_queries(client, query, named):
    assert re.search(
        naming(*named), (await recent(client, "acme", 400, **query))["error"]["message"]
    )


async def test_an_open_request(client):
    """The list itself is open, but generates nothing."""
    found = await recent(client, "acme", status="open")
    assert (found["requests"], found["open"], found["num_open"]) == ([], [], 0)
