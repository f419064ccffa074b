"""A stream of server-sent events that ends when its client goes."""

import contextlib
from collections.abc import AsyncGenerator, Awaitable

import msgspec
from starlette.types import Receive, Scope, Send

from loraplex.frontends.kserve.errors import as_loraplex_error, message_of, status_of
from loraplex.frontends.kserve.http.generate import encode_generate
from loraplex.frontends.kserve.service import ResponseStream
from loraplex.frontends.streams import ClientDisconnectedError, until_disconnect


class EventStream:
    """An ASGI response: each answer as `data: {json}`, no closing mark.

    The first answer fixes the status: if it is an error, the stream has the error's status. The
    answers are closed in any case; a client that goes ends them.
    """

    def __init__(self, responses: ResponseStream) -> None:
        self._responses = responses

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        del scope
        try:
            with contextlib.suppress(ClientDisconnectedError):
                await until_disconnect(receive, self._send_all(send))
        finally:
            await self._responses.aclose()

    async def _send_all(self, send: Send) -> None:
        has_started = False
        async for status, event in self._events():
            if not has_started:
                await _start(send, status)
                has_started = True
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _events(self) -> AsyncGenerator[tuple[int, bytes], None]:
        try:
            async for response in self._responses:
                yield 200, _event(encode_generate(response))
        except Exception as raised:
            error = as_loraplex_error(raised)
            yield status_of(error).http, _event({"error": message_of(error)})


def _event(content: object) -> bytes:
    return b"data: " + msgspec.json.encode(content) + b"\n\n"


def _start(send: Send, status: int) -> Awaitable[None]:
    headers = [
        (b"content-type", b"text/event-stream; charset=utf-8"),
        (b"cache-control", b"no-cache"),
    ]
    return send({"type": "http.response.start", "status": status, "headers": headers})
