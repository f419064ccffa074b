"""The console's files as they are served."""

import gzip
import importlib.resources

import httpx
import pytest
from starlette.applications import Starlette

from loraplex.frontends.console.routes import HEADERS, HOME, console_routes, files

STATIC = importlib.resources.files("loraplex.frontends.console") / "static"


@pytest.fixture
async def client():
    transport = httpx.ASGITransport(Starlette(routes=console_routes()))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        yield client


@pytest.mark.parametrize("path", files())
async def test_each_file_has_every_header(client, path):
    response = await client.get(path)
    assert response.status_code == 200
    assert {name: response.headers[name] for name in HEADERS} == HEADERS
    assert response.content == (STATIC / files()[path]).read_bytes()


async def test_the_policy_allows_this_server_only(client):
    policy = (await client.get(HOME)).headers["content-security-policy"]
    sources = [source for part in policy.split("; ") for source in part.split()[1:]]
    assert set(sources) == {"'none'", "'self'", "data:", "'script'"}


async def test_a_browser_keeps_what_did_not_change(client):
    first = await client.get(HOME + "main.js", headers={"accept-encoding": "gzip"})
    assert first.headers["content-encoding"] == "gzip"
    tag = {"if-none-match": first.headers["etag"]}
    again = await client.get(HOME + "main.js", headers=tag)
    assert (again.status_code, again.content) == (304, b"")
    assert again.headers["content-security-policy"] == HEADERS["content-security-policy"]


async def test_without_gzip_a_file_is_sent_as_it_is(client):
    plain = await client.get(HOME + "main.js", headers={"accept-encoding": "identity"})
    assert "content-encoding" not in plain.headers


@pytest.mark.parametrize("path", ["/", "/console"])
async def test_other_paths_lead_home(client, path):
    response = await client.get(path)
    assert (response.status_code, response.headers["location"]) == (303, HOME)


@pytest.mark.parametrize("path", ["README.md", "vendor/SHA256SUMS", "../routes.py", "absent.js"])
async def test_nothing_else_is_served(client, path):
    assert (await client.get(HOME + path)).status_code == 404


def test_the_page_is_small():
    served = {name: (STATIC / name).read_bytes() for name in files().values()}
    own = sum(len(content) for name, content in served.items() if not name.startswith("vendor/"))
    packed = sum(len(gzip.compress(content)) for content in served.values())
    assert own <= 300 << 10
    assert packed <= 250_000
