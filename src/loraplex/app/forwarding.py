"""Forwarding of requests by a front-end process to the owner, byte for byte."""

import asyncio
from collections.abc import AsyncIterator
from typing import Final

import httpx
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from loraplex.app.access import refusal
from loraplex.core.errors import LoraplexError, NotReadyError

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
