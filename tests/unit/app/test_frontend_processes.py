"""Front-end processes: what is refused at the start, their share of limits, and forwarding."""

import contextlib
import socket
import sys
from types import SimpleNamespace

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse

from loraplex.app import frontend_processes
from loraplex.app.front_ends import front_ends
from loraplex.app.frontend_process import DividedApp, Forwarder
from loraplex.app.frontend_processes import FrontendProcesses, check_frontends, share_of
from loraplex.app.http_server import serving_listener
from loraplex.app.serving_process import bind
from loraplex.core.config import Config
from loraplex.core.errors import ConfigError
from loraplex.core.server_config import ServerConfig
from loraplex.frontends.ops.frontend_numbers import OtherFrontends
from loraplex.frontends.telemetry.connections import HttpConnections
from support.naming import naming

TWO = ServerConfig(frontend_processes=2)


def test_what_only_one_process_does_is_refused():
    check_frontends(ServerConfig(http=False), may_add_models=True)
    check_frontends(TWO, may_add_models=False)
    with pytest.raises(ConfigError, match=naming("frontend_processes", 2, "HTTP")):
        check_frontends(ServerConfig(frontend_processes=2, http=False), may_add_models=False)
    with pytest.raises(ConfigError, match=naming("frontend_processes", 2, 1)):
        check_frontends(TWO, may_add_models=True)


async def test_front_ends_without_ports_have_one_process():
    def launch(_):
        raise AssertionError("nothing may start")

    composed = front_ends(Config(server=TWO, models={}), launch)
    with pytest.raises(ConfigError, match=naming("frontend_processes", 2)):
        await composed.__aenter__()


def test_limits_that_each_process_counts_are_divided():
    settings = ServerConfig(frontend_processes=3, max_connections=100, max_body_bytes=30)
    share = share_of(settings)
    assert (share.max_connections, share.max_bodies_bytes) == (34, 80)
    assert share_of(ServerConfig()) == ServerConfig()


def test_processes_share_a_port_and_others_do_not():
    with contextlib.closing(bind("127.0.0.1", 0, is_shared=True)) as first:
        port = first.getsockname()[1]
        bind("127.0.0.1", port, is_shared=True).close()
        with pytest.raises(ConfigError, match=naming("127.0.0.1")):
            bind("127.0.0.1", port)


async def test_a_process_that_cannot_start_is_reported(monkeypatch):
    command = (sys.executable, "-c", "import sys; sys.stdin.buffer.read(); sys.exit(3)")
    monkeypatch.setattr(frontend_processes, "_COMMAND", command)
    service = SimpleNamespace(models=list, draining=SimpleNamespace(is_active=False))
    config = Config(server=TWO, models={})
    processes = FrontendProcesses(service, config, (), OtherFrontends())
    async with processes.running(echo, 1, lambda: 0.0):
        with pytest.raises(ConfigError, match=naming(3)):
            await processes.until_open()


async def echo(scope, receive, send):
    """Return what came, in two parts."""
    request = Request(scope, receive)
    body = await request.body()
    if request.url.path == "/cut":
        return
    if request.url.path == "/stream":
        parts = StreamingResponse(iter([b"one", b"two"]), 201, headers={"x-odd": "1"})
        await parts(scope, receive, send)
        return
    found = {
        "method": request.method,
        "target": scope["raw_path"].decode() + "?" + scope["query_string"].decode(),
        "headers": [[name.decode(), value.decode()] for name, value in scope["headers"]],
        "client": scope["client"][0],
        "body": body.decode(),
    }
    await JSONResponse(found)(scope, receive, send)


@pytest.fixture
async def client(tmp_path):
    """A client of an app that forwards to `echo`, as a front-end process does to the owner."""
    path = str(tmp_path / "http")
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()
    settings = ServerConfig(trusted_proxies=("*",))
    async with serving_listener(echo, settings, listener, HttpConnections()):
        forwarder = Forwarder(path, "openai")
        app = DividedApp(JSONResponse("own"), frozenset({("POST", "/own")}), forwarder)
        transport = httpx.ASGITransport(app, client=("192.0.2.7", 1))
        async with httpx.AsyncClient(transport=transport, base_url="http://front") as client:
            yield client
        await forwarder.close()


async def test_requests_are_forwarded_as_they_are(client):
    headers = {"x-forwarded-for": "6.6.6.6", "x-own": "a b", "connection": "close"}
    target = "/a%2Fb/%7Ec?x=%20y&z"
    response = await client.put(target, content=b"body", headers=headers)
    found = response.json()
    assert (found["method"], found["target"], found["body"]) == ("PUT", target, "body")
    assert found["client"] == "192.0.2.7"
    names = [name for name, _ in found["headers"]]
    assert ["x-own", "a b"] in found["headers"]
    assert ["host", "front"] in found["headers"]
    assert len(names) == len(set(names))
    assert "6.6.6.6" not in str(found)


async def test_bodies_without_a_length_and_none_at_all(client):
    async def parts():
        yield b"bo"
        yield b"dy"

    assert (await client.post("/x", content=parts())).json()["body"] == "body"
    assert (await client.get("/x")).json()["body"] == ""


async def test_responses_are_forwarded_as_they_are(client):
    response = await client.get("/stream")
    assert (response.status_code, response.content) == (201, b"onetwo")
    assert response.headers["x-odd"] == "1"
    assert (await client.post("/own")).json() == "own"
    assert (await client.get("/own")).json()["target"] == "/own?"


async def test_an_owner_that_is_gone_is_an_error_to_be_tried_again(tmp_path):
    forwarder = Forwarder(str(tmp_path / "none"), "openai")
    async with httpx.AsyncClient(transport=httpx.ASGITransport(forwarder)) as client:
        response = await client.get("http://front/v1/models")
    assert response.status_code == 503
    assert "the server is stopping" in response.text
    await forwarder.close()
