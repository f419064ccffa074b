"""The memory of the bodies of all connections has a limit."""

import asyncio
import json

import pytest
from starlette.responses import Response

from loraplex.app.access import refusal
from loraplex.core.errors import NotReadyError
from loraplex.core.server_config import ServerConfig
from loraplex.frontends import body_limits
from loraplex.frontends.access import by_api_key
from loraplex.frontends.body_limits import BodyMemory
from loraplex.frontends.middleware import RequestMiddleware
from loraplex.frontends.telemetry.telemetry import Telemetry
from loraplex.serving.access.api_key_ring import ApiKeys
from loraplex.serving.response_memory import ResponseMemory
from support.described_app import TEST_HOST, described_app
from support.echo_service import EchoService
from support.naming import naming

MIB = 1 << 20
SMALL = 64 << 10
ALLOW = "access-control-allow-origin"


class Upload:
    """A POST whose body arrives in pieces."""

    def __init__(self, app, *, path="/v1/completions", **headers) -> None:
        self.pieces: asyncio.Queue[dict] = asyncio.Queue()
        self.sent: list[dict] = []
        self.num_read = 0
        self._scope = {
            "type": "http",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": [(b"host", TEST_HOST.encode()), (b"content-type", b"application/json")]
            + [(name.encode(), value.encode()) for name, value in headers.items()],
            "client": ("127.0.0.1", 1),
        }
        self.task = asyncio.create_task(app(self._scope, self._receive, self._send))

    async def _receive(self):
        message = await self.pieces.get()
        self.num_read += len(message["body"])
        return message

    async def _send(self, message):
        self.sent.append(message)

    async def add(self, num_bytes: int, *, is_last: bool = False) -> None:
        body = b" " * num_bytes
        self.pieces.put_nowait({"type": "http.request", "body": body, "more_body": not is_last})
        while not (self.pieces.empty() or self.task.done()):
            await asyncio.sleep(0)
        await asyncio.sleep(0)

    @property
    def status(self) -> int:
        return self.sent[0]["status"]

    @property
    def retry_after(self) -> str:
        return dict(self.sent[0]["headers"])[b"retry-after"].decode()


def app_with(**settings):
    settings = {"allowed_hosts": (TEST_HOST,), "max_body_bytes": MIB} | settings
    return described_app(EchoService(), settings=ServerConfig(**settings))


@pytest.mark.parametrize("path", ["/v1/completions", "/v2/models/echo/infer"])
async def test_of_a_hundred_long_bodies_those_over_the_limit_are_refused(path):
    app = app_with(max_bodies_bytes=10 * MIB)
    uploads = [Upload(app, path=path) for _ in range(100)]
    for upload in uploads:
        await upload.add(MIB - 1)
    refused = [upload for upload in uploads if upload.task.done()]
    assert len(refused) == 90
    assert {(upload.status, upload.retry_after) for upload in refused} == {(503, "1")}
    small = Upload(app, path=path)
    await small.add(SMALL, is_last=True)
    await asyncio.wait_for(small.task, 60)
    assert small.status == 400
    for upload in uploads:
        upload.task.cancel()
    await asyncio.gather(*(upload.task for upload in uploads), return_exceptions=True)
    again = Upload(app, path=path)
    await again.add(MIB - 1)
    assert not again.task.done()
    again.task.cancel()


async def test_without_a_valid_key_nothing_is_read():
    keys = ApiKeys(None, given=["sk-valid"])
    settings = ServerConfig(allowed_hosts=(TEST_HOST,))
    app = described_app(EchoService(), by_api_key(keys), settings)
    for headers in ({}, {"authorization": "Bearer sk-wrong"}):
        for path in ("/v1/completions", "/v2/models/echo/infer", "/v1/adapters"):
            upload = Upload(app, path=path, **headers)
            await upload.add(MIB)
            await asyncio.wait_for(upload.task, 60)
            assert (upload.status, upload.num_read) == (401, 0)


def _counting(app, bodies, responses):
    return RequestMiddleware(
        app, Telemetry(), bodies, responses, refusal, is_draining=lambda: False
    )


async def test_a_response_that_has_begun_frees_the_memory():
    memory = BodyMemory(MIB, MIB)
    may_end = asyncio.Event()

    async def app(scope, receive, send):
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await may_end.wait()

    upload = Upload(_counting(app, memory, ResponseMemory()))
    await upload.add(SMALL + 1000)
    while not upload.sent:
        await asyncio.sleep(0)
    assert memory.num_bytes == 0
    may_end.set()
    await upload.task
    assert memory.num_bytes == 0


class TestLimits:
    def test_a_tenant_has_half_of_it_if_there_are_keys(self):
        memory = BodyMemory.of(ServerConfig(max_body_bytes=10, max_bodies_bytes=100), has_keys=True)
        memory.take("a", 50)
        with pytest.raises(
            NotReadyError, match=naming("100 B in total", "50 B for a tenant", "max_bodies_bytes")
        ):
            memory.take("a", 1)
        memory.take("b", 50)
        with pytest.raises(NotReadyError):
            memory.take("c", 1)
        memory.release("a", 50)
        memory.take("c", 1)
        assert memory.num_bytes == 51

    def test_the_default_follows_the_size_of_a_body(self):
        memory = BodyMemory.of(ServerConfig(max_body_bytes=10), has_keys=False)
        memory.take("", 80)
        with pytest.raises(NotReadyError, match=naming("80 B in total", "max_bodies_bytes")):
            memory.take("", 1)

    def test_a_body_of_the_maximum_size_always_fits(self):
        settings = ServerConfig(max_body_bytes=10, max_bodies_bytes=1)
        BodyMemory.of(settings, has_keys=True).take("a", 10)

    def test_a_lease_counts_for_its_tenant(self, monkeypatch):
        memory = BodyMemory(100, 50)
        monkeypatch.setattr(body_limits, "current_tenant", lambda: "a")
        lease = memory.lease()
        lease.take(SMALL)
        assert memory.num_bytes == 0
        lease.take(50)
        with pytest.raises(NotReadyError):
            lease.take(1)
        memory.take("b", 1)
        memory.release("b", 1)
        lease.release()
        lease.release()
        assert memory.num_bytes == 0


async def _sent(
    responses: ResponseMemory,
    size: int,
    *,
    waits: asyncio.Event | None = None,
    path="/v1/models",
    **headers,
):
    """Return the messages of a response of a size."""

    async def app(scope, receive, send) -> None:
        await Response(bytes(size), headers=headers)(scope, receive, send)

    messages = []

    async def send(message) -> None:
        messages.append(message)
        if waits is not None:
            await waits.wait()

    scope = {"type": "http", "method": "GET", "path": path, "headers": []}
    await _counting(app, BodyMemory(), responses)(scope, None, send)
    return messages


async def test_a_long_response_counts_until_it_is_sent():
    responses, goes_on = ResponseMemory(1000 << 10, 1000 << 10), asyncio.Event()
    first = asyncio.create_task(_sent(responses, 600 << 10, waits=goes_on))
    await asyncio.sleep(0)
    assert responses.num_bytes == 600 << 10
    start, body = await _sent(responses, 600 << 10)
    assert (start["status"], dict(start["headers"])[b"retry-after"]) == (503, b"1")
    assert json.loads(body["body"])["error"]["code"] == NotReadyError.code
    start, body = await _sent(responses, 600 << 10, path="/v2/models/ensemble/infer")
    assert (start["status"], list(json.loads(body["body"]))) == (503, ["error"])
    assert "max_bodies_bytes" in json.loads(body["body"])["error"]
    # A page of another origin must see why: what the app said about origins stays.
    start, _ = await _sent(responses, 600 << 10, vary="Origin", **{ALLOW: "https://a.example"})
    headers = dict(start["headers"])
    assert (start["status"], headers[ALLOW.encode()]) == (503, b"https://a.example")
    assert (headers[b"vary"], b"x-request-id" in headers) == (b"Origin", True)
    assert [(await _sent(responses, size))[0]["status"] for size in (10, 300 << 10)] == [200, 200]
    goes_on.set()
    assert (await first)[0]["status"] == 200
    assert responses.num_bytes == 0
