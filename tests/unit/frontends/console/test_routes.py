"""The console's files as they are served."""

import gzip
import importlib.resources
from pathlib import Path

import httpx
import pytest
from starlette.applications import Starlette

from loraplex.frontends.console.routes import (
    HEADERS,
    HOME,
    console_routes,
    files,
    served_content,
)

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
    assert response.content == served_content(files()[path])
    if not path.endswith(".css"):
        whole = (STATIC / files()[path]).read_bytes()
        assert response.content.count(b"\n") == whole.count(b"\n")


async def test_the_policy_allows_this_server_only(client):
    policy = (await client.get(HOME)).headers["content-security-policy"]
    sources = [source for part in policy.split("; ") for source in part.split()[1:]]
    assert set(sources) == {"'none'", "'self'", "data:", "'script'"}


async def test_a_browser_keeps_what_did_not_change(client):
    first = await client.get(HOME + "shell.js", headers={"accept-encoding": "gzip"})
    assert first.headers["content-encoding"] == "gzip"
    tag = {"if-none-match": first.headers["etag"]}
    again = await client.get(HOME + "shell.js", headers=tag)
    assert (again.status_code, again.content) == (304, b"")
    assert again.headers["content-security-policy"] == HEADERS["content-security-policy"]


async def test_without_gzip_a_file_is_sent_as_it_is(client):
    plain = await client.get(HOME + "shell.js", headers={"accept-encoding": "identity"})
    assert "content-encoding" not in plain.headers


@pytest.mark.parametrize("path", ["/", "/console"])
async def test_other_paths_lead_home(client, path):
    response = await client.get(path)
    assert (response.status_code, response.headers["location"]) == (303, HOME)


@pytest.mark.parametrize("path", ["README.md", "vendor/SHA256SUMS", "../routes.py", "absent.js"])
async def test_nothing_else_is_served(client, path):
    assert (await client.get(HOME + path)).status_code == 404


def test_comments_are_not_sent_and_everything_else_is():
    whole = (STATIC / "lib/route.js").read_text()
    sent = served_content("lib/route.js").decode()
    assert "/**" in whole
    assert "//" not in sent
    code = [line for line in whole.splitlines() if not line.strip().startswith(("/", "*"))]
    assert [line for line in sent.splitlines() if line.strip()] == [line for line in code if line]
    assert served_content("vendor/marked.mjs") == (STATIC / "vendor/marked.mjs").read_bytes()


def test_styles_are_one_file():
    sent = served_content("style.css").decode()
    assert "@import" not in sent
    for path in Path(str(STATIC)).rglob("*.css"):
        first = next(line for line in path.read_text().splitlines() if line.startswith((".", ":")))
        assert first in sent, path
    assert [name for name in files().values() if name.endswith(".css")] == ["style.css"]


def test_the_page_is_small():
    served = {name: served_content(name) for name in files().values()}
    own = sum(len(content) for name, content in served.items() if not name.startswith("vendor/"))
    assert own <= 400 << 10
    # All screens in one language, which is what a reader can load at most.
    loaded = [
        content
        for name, content in served.items()
        if not name.endswith((".txt", "texts/zh.js", "texts/ja.js"))
    ]
    assert sum(len(gzip.compress(content)) for content in loaded) <= 120_000
