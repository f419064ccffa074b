"""The checks of the HTTP middleware, one by one, and their order."""

import asyncio

import pytest
from starlette.responses import PlainTextResponse, StreamingResponse

from loraplex.app.access import refusal
from loraplex.core.errors import (
    InvalidRequestError,
    NotReadyError,
    PermissionDeniedError,
    QueueFullError,
    UnauthenticatedError,
)
from loraplex.core.principal import LOCAL, Principal, Rights
from loraplex.frontends.body_limits import BodyMemory
from loraplex.frontends.middleware import (
    RequestMiddleware,
    checked,
    host_check,
    key_check,
    page_check,
)
from loraplex.frontends.telemetry.telemetry import Telemetry
from loraplex.serving.response_memory import ResponseMemory
from loraplex.serving.wire_request import note_error
from support.naming import naming


def scope_of(method="POST", path="/v1/x", **headers):
    raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return {"type": "http", "method": method, "path": path, "headers": raw}


class TestHosts:
    @pytest.mark.parametrize(
        "host",
        ["localhost", "a.localhost:8000", "127.0.0.1:80", "[::1]:80", "M.example.", "m.example:1"],
    )
    def test_known(self, host):
        host_check(["m.example"])(scope_of(host=host))

    @pytest.mark.parametrize("host", ["evil.example", "m.example.evil", "localhost.evil", ""])
    def test_unknown(self, host):
        with pytest.raises(InvalidRequestError, match=naming("allowed_hosts")):
            host_check(["m.example"])(scope_of(host=host))

    def test_any(self):
        host_check(["*"])(scope_of(host="evil.example"))

    def test_none(self):
        host_check([])(scope_of())


class TestPages:
    check = staticmethod(page_check(["https://ours.example"]))

    def test_of_others_may_not_send_a_form(self):
        with pytest.raises(PermissionDeniedError, match=naming("cors_origins", "evil.example")):
            self.check(scope_of(origin="https://evil.example"))

    @pytest.mark.parametrize(
        "scope",
        [
            scope_of("GET", origin="https://evil.example"),
            scope_of(),
            scope_of(origin="https://ours.example"),
            scope_of(origin="https://evil.example", content_type="application/json"),
            scope_of(origin="http://a.example", host="a.example"),
            scope_of(origin="null", sec_fetch_site="same-origin"),
        ],
    )
    def test_what_may_be_sent(self, scope):
        self.check(scope)


_TENANT = Principal("acme", Rights(operator=False))


def _without_key(_headers):
    raise UnauthenticatedError("no key")


class TestKeys:
    def test_open_paths_and_pages(self):
        check = key_check(_without_key, open_paths=["/ping"], open_pages=["/console/"])
        check(scope_of(path="/ping"))
        check(scope_of("GET", "/console/"))
        for closed in (scope_of(path="/console/"), scope_of(path="/ping/")):
            with pytest.raises(UnauthenticatedError):
                check(closed)

    def test_of_operators(self):
        check = key_check(lambda _headers: _TENANT, operators_only_to="see the metrics")
        with pytest.raises(PermissionDeniedError, match=naming("see the metrics")):
            check(scope_of())
        key_check(lambda _headers: LOCAL, operators_only_to="see the metrics")(scope_of())


@pytest.mark.parametrize("kind", ["http", "websocket"])
async def test_the_first_check_that_fails_decides(kind):
    def fail(_scope):
        raise InvalidRequestError("first")

    sent = []

    async def send(message):
        sent.append(message)

    app = checked(
        PlainTextResponse("served"),
        (host_check(["*"]), fail, key_check(_without_key)),
        lambda path, error: PlainTextResponse(f"{path} {error.message}", 400),
    )
    await app({**scope_of(host="a"), "type": kind}, None, send)
    assert sent[-1]["body"] == b"/v1/x first"


class TestStatusesOfStreams:
    """What logs and metrics have of a response that began with status 200."""

    @staticmethod
    async def logged(app, *, is_draining=False, cancels=False):
        """Return the status of one request, in the telemetry."""
        ended = []
        memory = BodyMemory(1 << 20, 1 << 20)
        middleware = RequestMiddleware(
            *(app, Telemetry([ended.append]), memory, ResponseMemory(), refusal),
            is_draining=lambda: is_draining,
        )
        begun = asyncio.Event()

        async def send(message):
            begun.set()

        async def receive():
            await asyncio.Event().wait()

        scope = scope_of(path="/v1/completions") | {"client": ("127.0.0.1", 1)}
        task = asyncio.create_task(middleware(scope, receive, send))
        if cancels:
            await begun.wait()
            task.cancel()
        await asyncio.wait([task])
        (request,) = ended
        return request.status

    @staticmethod
    def stream(*, error=None, is_endless=False, media_type="text/event-stream"):
        async def events():
            yield "data: {}\n\n"
            if is_endless:
                await asyncio.Event().wait()
            if error is not None:
                note_error(error)

        async def app(scope, receive, send):
            await StreamingResponse(events(), media_type=media_type)(scope, receive, send)

        return app

    async def test_one_that_ends_well(self):
        assert await self.logged(self.stream()) == "200"

    @pytest.mark.parametrize(
        ("error", "status"), [(NotReadyError("stopping"), "503"), (QueueFullError("full"), "429")]
    )
    async def test_one_that_ends_with_an_error(self, error, status):
        assert await self.logged(self.stream(error=error)) == status
        # An entry of a JSON response may have an error, too: the response is whole.
        app = self.stream(error=error, media_type="application/json")
        assert await self.logged(app) == "200"

    @pytest.mark.parametrize(("is_draining", "status"), [(True, "503"), (False, "499")])
    async def test_one_that_is_cut(self, is_draining, status):
        app = self.stream(is_endless=True)
        assert await self.logged(app, is_draining=is_draining, cancels=True) == status
