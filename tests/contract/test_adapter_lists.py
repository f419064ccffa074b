"""Pages of GET /v1/adapters, and GET /v1/usage, over HTTP."""

import re

import httpx
import pytest
from starlette.applications import Starlette

from loraplex.frontends.access import by_api_key
from loraplex.frontends.openai.app import openai_fallback_routes, openai_routes
from loraplex.serving.access.api_key_ring import ApiKeys
from loraplex.serving.access.api_keys import new_key
from loraplex.serving.adapter_usage import UsedAdapter
from support.echo_service import EchoService
from support.naming import naming

OPERATOR, TENANT = new_key(), new_key()
HOSTILE = "<img src=x onerror=alert(1)>"


@pytest.fixture
def backend():
    backend = EchoService()
    for name in ("fr", "legal", "org/de", HOSTILE):
        backend.register(name)
    usage = backend.adapter_usage
    for tenant in ("acme", "other"):
        for name in ("fr", "legal"):
            usage.count(tenant, [UsedAdapter("echo", "default", name)], num_prompt_tokens=3)
    usage.count("acme", [UsedAdapter("echo")], num_output_tokens=2)
    usage.count("acme", [UsedAdapter("echo", "acme", "own")], is_error=True)
    return backend


@pytest.fixture
async def client(backend):
    app = Starlette()
    keys = by_api_key(ApiKeys(None, f"{OPERATOR} acme:{TENANT}"))
    app.router.routes.extend([*openai_routes(backend, None, keys), *openai_fallback_routes()])
    headers = {"authorization": f"Bearer {TENANT}"}
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(
        transport=transport, base_url="http://x", headers=headers
    ) as client:
        yield client


async def get(client, path, **query):
    response = await client.get(path, params=query)
    assert response.status_code == 200, response.text
    return response.json()


class TestAdapters:
    async def test_without_parameters_it_is_the_whole_list(self, client):
        whole = await get(client, "/v1/adapters")
        assert set(whole) == {"data", "object"}
        assert len(whole["data"]) == 4
        assert "aliases" not in whole["data"][0]

    async def test_pages_by_cursor(self, client):
        first = await get(client, "/v1/adapters", limit=3)
        assert [each["name"] for each in first["data"]] == [HOSTILE, "fr", "legal"]
        assert (first["total"], first["object"]) == (4, "list")
        second = await get(client, "/v1/adapters", limit=3, after=first["next"])
        assert [each["name"] for each in second["data"]] == ["org/de"]
        assert second["next"] is None
        last = await get(client, "/v1/adapters", offset=3)
        assert last["data"] == second["data"]

    async def test_search_and_order(self, client):
        found = await get(client, "/v1/adapters", search="E", sort="-name")
        assert [each["name"] for each in found["data"]] == ["org/de", "legal", HOSTILE]

    async def test_what_is_known_is_not_sent_again(self, backend, client):
        query = {"limit": "2"}
        tag = (await client.get("/v1/adapters", params=query)).headers["etag"]
        known = {"if-none-match": f'"x", W/{tag}'}
        again = await client.get("/v1/adapters", params=query, headers=known)
        assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", tag)
        backend.register("a")
        changed = await client.get("/v1/adapters", params=query, headers=known)
        assert changed.status_code == 200
        assert changed.headers["etag"] != tag

    @pytest.mark.parametrize(
        ("name", "value", "named"),
        [
            ("limit", "0", ("[1, 1000]", "'0'")),
            ("limit", "1001", ("[1, 1000]", "'1001'")),
            ("limit", "²", ("[1, 1000]", "'²'")),
            ("offset", "-1", ("[0, 10000000]", "'-1'")),
            ("sort", "age", ("name", "-name", "size", "rank", "'age'")),
            ("state", "lost", ("ready", "missing", "unvalidated", "unfit", "'lost'")),
            ("residency", "moon", ("absent", "loading", "host", "device", "'moon'")),
            ("has_warnings", "1", ("true", "false", "'1'")),
            ("search", "x" * 257, (256, 257)),
            ("after", "x", ("'next'",)),
        ],
    )
    async def test_bad_parameters_are_refused(self, client, name, value, named):
        response = await client.get("/v1/adapters", params={name: value})
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, name)
        assert re.search(naming(name, *named), error["message"]), error["message"]


class TestUsage:
    async def test_the_own(self, client):
        usage = await get(client, "/v1/usage", by="adapter")
        assert [(each["adapter"], each["owner"]) for each in usage["data"]] == [
            (None, None),
            ("own", "acme"),
            ("fr", "default"),
            ("legal", "default"),
        ]
        assert {each["tenant"] for each in usage["data"]} == {"acme"}
        assert [each["prompt_tokens"] for each in usage["data"]] == [0, 0, 3, 3]
        assert (usage["data"][1]["errors"], usage["other"]["requests"]) == (1, 0)
        assert usage["since"] > 0

    async def test_of_one_adapter(self, client):
        usage = await get(client, "/v1/usage", adapter="fr")
        assert [each["adapter"] for each in usage["data"]] == ["fr"]

    async def test_by_minute(self, client):
        assert "series" not in await get(client, "/v1/usage")
        usage = await get(client, "/v1/usage", series="minute", adapter="fr")
        assert len(usage["series"]) == 60
        [fr] = usage["data"]
        for field in ("requests", "errors", "prompt_tokens", "output_tokens"):
            assert sum(minute[field] for minute in usage["series"]) == fr[field]
        everything = await get(client, "/v1/usage", series="minute")
        requests = sum(minute["requests"] for minute in everything["series"])
        assert requests == sum(one["requests"] for one in everything["data"])
        wrong = await client.get("/v1/usage", params={"series": "hour"})
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "series")

    async def test_another_tenants_is_refused(self, client):
        for tenant in ("other", "*", ""):
            response = await client.get("/v1/usage", params={"tenant": tenant})
            assert response.status_code == 403
            assert "'acme' may not see what other tenants use" in response.text

    async def test_operators_see_all_tenants_by_pages(self, client):
        client.headers["authorization"] = f"Bearer {OPERATOR}"
        assert (await get(client, "/v1/usage"))["data"] == []
        other = await get(client, "/v1/usage", tenant="other")
        assert [each["adapter"] for each in other["data"]] == ["fr", "legal"]
        whole = (await get(client, "/v1/usage", tenant="*"))["data"]
        assert len(whole) == 6
        found, after = [], {}
        while True:
            page = await get(client, "/v1/usage", tenant="*", limit=4, **after)
            found += page["data"]
            if page["next"] is None:
                break
            after = {"after": page["next"]}
        assert found == whole

    @pytest.mark.parametrize(
        ("name", "value"), [("by", "month"), ("limit", "x"), ("after", "W10="), ("after", "#")]
    )
    async def test_bad_parameters_are_refused(self, client, name, value):
        response = await client.get("/v1/usage", params={name: value})
        assert (response.status_code, response.json()["error"]["param"]) == (400, name)
