"""A front-end process: it serves the HTTP port, and leaves to the owner what is not text.

The owner starts it with a FrontendStart on standard input, and decides when it ends.
"""

import asyncio
import contextlib
import gc
import logging
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from typing import Final

import httpx
import msgspec
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from loraplex.app.access import (
    api_keys,
    authenticate_by,
    following,
    guarded,
    refusal,
    refusals,
    served_as_known_hosts,
)
from loraplex.app.builder import build_texts
from loraplex.app.dialects import dialect_of
from loraplex.app.frontend_processes import FrontendStart
from loraplex.app.http_app import openai_options
from loraplex.app.http_server import serving_http
from loraplex.app.launch import set_up_logging, with_open_files
from loraplex.app.reporting import Reporting, reporting_requests
from loraplex.app.serving_process import run_on_event_loop
from loraplex.app.tls import certificates
from loraplex.core.errors import LoraplexError, NotReadyError
from loraplex.core.process_group import leave_group
from loraplex.frontends.access import Authenticate
from loraplex.frontends.body_limits import BodyMemory
from loraplex.frontends.middleware import RequestMiddleware
from loraplex.frontends.openai.app import text_routes
from loraplex.frontends.openai.context import TextContext
from loraplex.frontends.ops.frontend_numbers import encoded_families
from loraplex.frontends.telemetry.recent_requests import RequestQuery
from loraplex.serving.access.api_key_ring import ApiKeys
from loraplex.serving.remote.messages import (
    Count,
    FromOwner,
    ListedRequests,
    ListRequests,
    Numbers,
    Refresh,
    StopProcess,
)
from loraplex.serving.remote.remote_service import RemoteService
from loraplex.serving.request_metrics import RequestMetrics
from loraplex.serving.response_memory import ResponseMemory

logger = logging.getLogger(__name__)


_HOP_BY_HOP: Final = frozenset(
    {
        *(b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"upgrade"),
        *(b"transfer-encoding", b"expect", b"x-forwarded-for", b"x-forwarded-proto"),
    }
)
"""Headers of a request that are about its connection; those about the client are written anew."""
_OF_RESPONSE: Final = frozenset((b"transfer-encoding", b"date"))
"""Headers of a response that the server of this process writes."""
_NO_REUSE: Final = httpx.Limits(max_connections=None, max_keepalive_connections=0)
"""A connection that is kept might end just when it is used again. New ones cost little here."""


class Forwarder:
    """App whose responses are the owner's."""

    def __init__(self, path: str, dialect: str) -> None:
        """path: of the owner's Unix socket. dialect: of the OpenAI routes, for errors."""
        self._dialect = dialect
        self._transport = httpx.AsyncHTTPTransport(uds=path, limits=_NO_REUSE)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = _Exchange(scope, receive, send)
        try:
            await exchange.run(self._transport)
        except (httpx.TransportError, LoraplexError) as error:
            if exchange.has_begun:
                raise
            if not isinstance(error, LoraplexError):
                error = NotReadyError("the server is stopping", retry_after_seconds=1)
            await refusal(scope["path"], error, self._dialect)(scope, receive, send)

    async def close(self) -> None:
        await self._transport.aclose()


class _Exchange:
    """One request, and its response."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._scope = scope
        self._receive = receive
        self._send = send
        self._watch: asyncio.Task[None] | None = None
        self.has_begun = False
        """The response has begun."""

    async def run(self, transport: httpx.AsyncHTTPTransport) -> None:
        worker = asyncio.current_task()
        assert worker is not None
        try:
            await self._forward(transport)
        except ClientDisconnect:
            pass
        except asyncio.CancelledError:
            # Only its own cancellation, because its client has gone, ends here.
            if self._watch is None or not self._watch.done() or worker.uncancel():
                raise
        finally:
            if self._watch is not None:
                self._watch.cancel()

    async def _forward(self, transport: httpx.AsyncHTTPTransport) -> None:
        response = await transport.handle_async_request(self._request())
        assert isinstance(response.stream, httpx.AsyncByteStream)
        try:
            headers = [
                (name.lower(), value)
                for name, value in response.headers.raw
                if name.lower() not in _OF_RESPONSE
            ]
            self.has_begun = True
            status = response.status_code
            await self._send({"type": "http.response.start", "status": status, "headers": headers})
            async for chunk in response.stream:
                body = {"type": "http.response.body", "body": chunk, "more_body": True}
                await self._send(body)
            if self._watch is not None:
                self._watch.cancel()  # the end of the response looks as if the client had gone
            await self._send({"type": "http.response.body"})
        finally:
            await response.stream.aclose()

    def _request(self) -> httpx.Request:
        given = self._scope["headers"]
        names = {name for name, _ in given}
        headers = [(name, value) for name, value in given if name not in _HOP_BY_HOP]
        if self._scope.get("client"):
            headers.append((b"x-forwarded-for", self._scope["client"][0].encode()))
        headers.append((b"x-forwarded-proto", self._scope["scheme"].encode()))
        query = self._scope["query_string"]
        target = self._scope["raw_path"] + (b"?" + query if query else b"")
        has_body = not names.isdisjoint((b"content-length", b"transfer-encoding"))
        if not has_body:
            self._begin_watch()
        return httpx.Request(
            self._scope["method"],
            "http://owner/",
            headers=headers,
            content=self._body() if has_body else None,
            extensions={"target": target},
        )

    async def _body(self) -> AsyncIterator[bytes]:
        more = True
        while more:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            more = message.get("more_body", False)
            yield message.get("body", b"")
        self._begin_watch()

    def _begin_watch(self) -> None:
        """Cancel the exchange when the client goes: the owner then sees that, too."""
        worker = asyncio.current_task()
        assert worker is not None

        async def watch() -> None:
            while (await self._receive())["type"] != "http.disconnect":
                pass
            worker.cancel()

        self._watch = asyncio.create_task(watch())


class DividedApp:
    """App that serves some routes itself and forwards the rest."""

    def __init__(self, own: ASGIApp, own_routes: frozenset[tuple[str, str]], rest: ASGIApp) -> None:
        """own_routes: methods and paths."""
        self._own = own
        self._own_routes = own_routes
        self._rest = rest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_own = (scope.get("method"), scope.get("path")) in self._own_routes
        await (self._own if is_own else self._rest)(scope, receive, send)


class FrontendProcess:
    """One run of a front-end process."""

    def __init__(self, start: FrontendStart) -> None:
        self._start = start
        self._settings = start.config.server
        self._stop = asyncio.Event()
        self._stop_deadline = 0.0
        """Value of time.monotonic(), once it stops."""
        self._metrics = RequestMetrics(start.config.models)
        self._service = RemoteService(
            start.number,
            build_texts(start.config),
            self._metrics,
            self._take_command,
            self._lose_owner,
        )
        self._keys: ApiKeys | None = None
        self._reporting: Reporting | None = None

    async def run(self) -> None:
        """Serve until the owner ends it, or has ended."""
        start, settings = self._start, self._settings
        self._keys = api_keys(settings, start.given_keys, start.keys_variable)
        authenticate = authenticate_by(self._keys)
        forwarder = Forwarder(start.http_path, settings.dialect)
        async with contextlib.AsyncExitStack() as stack:
            self._reporting = stack.enter_context(reporting_requests(settings))
            stack.push_async_callback(forwarder.close)
            await stack.enter_async_context(following(self._keys))
            tls = certificates(settings)
            if tls is not None:
                await stack.enter_async_context(tls.following())
            await self._service.connect(start.owner_path)
            serving = serving_http(
                self._app(authenticate, self._reporting, forwarder),
                settings,
                settings.http_port,
                self._reporting.connections,
                tls,
                self._seconds_left,
                is_shared=True,
            )
            await stack.enter_async_context(serving)
            gc.freeze()  # as the owner: a collection must not visit what stays
            self._service.opened()
            await self._stop.wait()

    def _app(
        self, authenticate: Authenticate, reporting: Reporting, forwarder: Forwarder
    ) -> ASGIApp:
        settings, has_keys = self._settings, self._keys is not None
        options = openai_options(settings, dialect_of(self._start.config), has_keys=has_keys)
        routes = text_routes(TextContext(self._service, options, authenticate))
        bodies = BodyMemory.of(settings, has_keys=has_keys)
        self._service.responses = ResponseMemory.of(settings, has_keys=has_keys)
        behind = guarded(Starlette(routes=routes), authenticate, settings)
        own = RequestMiddleware(
            served_as_known_hosts(behind, settings, has_keys=has_keys),
            reporting.telemetry,
            bodies,
            self._service.responses,
            refusals(settings),
            is_draining=lambda: self._service.is_draining,
        )
        own_routes = {(method, route.path) for route in routes for method in route.methods or ()}
        return DividedApp(own, frozenset(own_routes), forwarder)

    def _take_command(self, message: FromOwner) -> None:
        assert self._reporting is not None
        match message:
            case Count(query_id):
                collectors = [self._metrics.registry, *self._reporting.collectors()]
                self._service.connection.send(Numbers(query_id, encoded_families(collectors)))
            case ListRequests(query_id, data):
                query = msgspec.json.decode(data, type=RequestQuery)
                page = self._reporting.recent.page(query, self._reporting.telemetry.open_requests)
                reply = ListedRequests(query_id, msgspec.json.encode(page))
                self._service.connection.send(reply)
            case Refresh():
                if self._reporting.access_log is not None:
                    self._reporting.access_log.reopen()
                if self._keys is not None:
                    asyncio.get_running_loop().run_in_executor(None, self._keys.refresh)
            case StopProcess(seconds):
                self._stop_deadline = time.monotonic() + seconds
                self._stop.set()

    def _lose_owner(self) -> None:
        """Nothing can be served without it."""
        if not self._stop.is_set():
            logger.error("the server's first process has ended, and so does this one")
            os._exit(1)

    def _seconds_left(self) -> float:
        return self._stop_deadline - time.monotonic()


def main() -> None:
    leave_group()
    # The owner decides when it ends.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    start = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=FrontendStart)
    settings = start.config.server
    set_up_logging(settings)
    start = msgspec.structs.replace(start, config=with_open_files(start.config))

    async def run() -> None:
        await FrontendProcess(start).run()

    run_on_event_loop(run())


if __name__ == "__main__":
    main()
