"""A stream of server-sent events that ends when its client goes."""

import contextlib

from starlette.types import Message, Receive, Scope, Send

from loraplex.frontends.body_limits import off_loop
from loraplex.frontends.kserve.errors import as_loraplex_error, message_of, status_of
from loraplex.frontends.kserve.http.generate import encode_generate
from loraplex.frontends.kserve.responses import ResponseStream
from loraplex.frontends.long_json import encoded
from loraplex.frontends.streams import ClientDisconnectedError, until_disconnect


class EventStream:
    """An ASGI response: each inference response as `data: {json}`, no closing mark.

    The first one fixes the status: if it is an error, the stream has the error's status. The
    source is closed in any case; a client that disconnects ends it.
    """

    def __init__(self, responses: ResponseStream) -> None:
        self._responses = responses
        self._status = 200

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        del scope
        try:
            with contextlib.suppress(ClientDisconnectedError):
                await until_disconnect(receive, self._send_all(send))
        finally:
            await self._responses.aclose()

    async def _send_all(self, send: Send) -> None:
        has_started = False
        while (event := await self._next()) is not None:
            if not has_started:
                await send(_start(self._status))
                has_started = True
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _next(self) -> bytes | None:
        """The next event; None at the end, which an error is, too."""
        if self._status != 200:
            return None
        try:
            response = await anext(self._responses, None)
            if response is None:
                return None
            return await off_loop(response.num_bytes, lambda: _event(encode_generate(response)))
        except Exception as raised:
            error = as_loraplex_error(raised)
            self._status = status_of(error).http
            return _event({"error": message_of(error)})


def _event(content: object) -> bytes:
    return b"".join((b"data: ", *encoded(content), b"\n\n"))


def _start(status: int) -> Message:
    headers = [
        (b"content-type", b"text/event-stream; charset=utf-8"),
        (b"cache-control", b"no-cache"),
    ]
    return {"type": "http.response.start", "status": status, "headers": headers}
