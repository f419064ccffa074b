"""Responses of the HTTP port to unknown paths, and what it lets web pages read."""

import asyncio
import http.client
import json
import threading
from pathlib import Path

import pytest
from starlette.responses import Response

from loraplex.app import http_app
from loraplex.app.access import served_as_known_hosts
from loraplex.core.server_config import ServerConfig
from loraplex.frontends.openapi.document import document


def send(server, method: str, path: str, **headers: str) -> tuple[int, dict[str, str], str]:
    """(status, headers by lower-case name, body)."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port())
    try:
        connection.request(method, path, headers=headers)
        response = connection.getresponse()
        received = {name.lower(): value for name, value in response.getheaders()}
        return response.status, received, response.read().decode()
    finally:
        connection.close()


@pytest.fixture
def log(tmp_path) -> Path:
    return tmp_path / "access.log"


async def noted(log: Path, method: str, path: str) -> tuple[int, str | None]:
    """(status, error) of the line of a method and path, once it is written."""
    async with asyncio.timeout(60):
        while True:
            lines = map(json.loads, log.read_text().splitlines() if log.exists() else ())
            for line in lines:
                if (line["method"], line["path"]) == (method, path):
                    return line["status"], line["error"]
            await asyncio.sleep(0.02)


async def refused(
    server, log: Path, method: str, path: str, status: int, code: str, message: str
) -> dict[str, str]:
    """Return the headers of an error that client, access log and metrics agree about."""
    got, headers, body = await asyncio.to_thread(send, server, method, path)
    assert got == status
    assert json.loads(body)["error"] == {
        "message": message,
        "type": "invalid_request_error",
        "param": None,
        "code": code,
    }
    assert await noted(log, method, path) == (status, code)
    _, _, metrics = await asyncio.to_thread(send, server, "GET", "/metrics")
    assert f'code="{code}",protocol="http",status="{status}"' in metrics
    return headers


METHODS_NOT_TAKEN = [
    ("TRACE", "/health/live", "GET, HEAD"),
    ("OPTIONS", "/health/live", "GET, HEAD"),
    ("PATCH", "/drain", "DELETE, GET, HEAD, POST"),
    ("PROPFIND", "/drain", "DELETE, GET, HEAD, POST"),
    ("PUT", "/openapi.json", "GET, HEAD"),
    ("POST", "/metrics", "GET, HEAD"),
    ("PUT", "/v1/completions", "OPTIONS, POST"),
    ("TRACE", "/v1/completions", "OPTIONS, POST"),
    ("TRACE", "/v1/adapters", "GET, HEAD, OPTIONS, POST"),
    ("PROPFIND", "/v1/completions", "POST"),
]


async def test_what_has_no_route(run, log):
    """One server for all cases: a start takes longer than its refusals."""
    server = run(access_log=str(log))
    await server.until_ready()
    for method, path, allowed in METHODS_NOT_TAKEN:
        log.write_bytes(b"")
        message = f"{path} does not take {method}; it takes {allowed}"
        headers = await refused(server, log, method, path, 405, "method_not_allowed", message)
        assert headers["allow"] == allowed
    for path in ("/nope", "/v1/nope"):
        message = f"there is no route POST {path}"
        await refused(server, log, "POST", path, 404, "route_not_found", message)


async def test_a_long_path_is_reported_in_part(run):
    server = run()
    await server.until_ready()
    for method, path in (("POST", "/" + "a" * 3000), ("PUT", "/v1/models/" + "a" * 3000)):
        _, _, body = await asyncio.to_thread(send, server, method, path)
        assert path[:200] in body
        assert path[:201] not in body


async def test_pages_may_read_which_adapters_were_used(run):
    page = "https://app.example.org"
    server = run(cors_origins=(page,))
    await server.until_ready()
    _, headers, _ = await asyncio.to_thread(send, server, "GET", "/v1/models", origin=page)
    shown = headers["access-control-expose-headers"].split(", ")
    assert shown == ["x-request-id", "retry-after", "x-loraplex-adapter"]


HOSTS = [
    ("127.0.0.1:8000", 200),
    ("localhost", 200),
    ("LOCALHOST.:8000", 200),
    ("box.localhost:8000", 200),
    ("[::1]:8000", 200),
    ("192.0.2.1", 200),
    ("models.example.org:8000", 200),
    ("evil.example", 400),
    ("evil.example:8000", 400),
    ("127.0.0.1.evil.example", 400),
    ("localhost.evil.example", 400),
    ("evillocalhost", 400),
    ("", 400),
]


async def test_a_page_whose_name_resolves_to_loopback_is_refused(run):
    """DNS rebinding: the page and the server are of one origin for the browser."""
    server = run(allowed_hosts=("models.example.org",))
    await server.until_ready()
    for path in ("/v1/models", "/v2", "/health", "/metrics", "/nowhere"):
        for host, status in HOSTS:
            got, _, body = await asyncio.to_thread(send, server, "GET", path, host=host)
            is_refused = got == 400 and "allowed_hosts" in body
            assert is_refused is (status == 400), (path, host, got, body)


@pytest.mark.parametrize(
    ("settings", "has_keys", "host", "is_served"),
    [
        ({}, False, "evil.example", False),
        ({}, True, "evil.example", True),
        ({"allowed_hosts": ("a.example",)}, True, "evil.example", False),
        ({"allowed_hosts": ("a.example",)}, True, "A.example:80", True),
        ({"allowed_hosts": ("*",)}, False, "evil.example", True),
        ({"host": "0.0.0.0"}, False, "evil.example", True),
        ({"host": "localhost"}, False, "evil.example", False),
        ({}, False, None, True),
    ],
)
async def test_hosts_are_checked_where_pages_could_do_harm(settings, has_keys, host, is_served):
    served = Response("fine")
    app = served_as_known_hosts(served, ServerConfig(**settings), has_keys=has_keys)
    headers = [] if host is None else [(b"host", host.encode())]
    sent = []

    async def send(message):
        sent.append(message)

    await app({"type": "http", "method": "GET", "path": "/", "headers": headers}, None, send)
    assert (sent[0]["status"] == 200) is is_served


async def test_the_document_is_made_once_and_off_the_event_loop(run, monkeypatch):
    """Making it takes seconds, in which the event loop would serve no other request."""
    threads = []

    def made(*arguments, **options):
        threads.append(threading.current_thread())
        return document(*arguments, **options)

    monkeypatch.setattr(http_app, "document", made)
    server = run()
    await server.until_ready()
    responses = await asyncio.gather(
        *(asyncio.to_thread(send, server, "GET", "/openapi.json") for _ in range(3))
    )
    assert {status for status, _, _ in responses} == {200}
    assert len({body for _, _, body in responses}) == 1
    [thread] = threads
    assert thread is not threading.current_thread(), "the event loop's"
