"""Server-sent events: one JSON chunk an event, `[DONE]` at the end, and what happens in between.

The status line waits for the first output, so an error up to then has its own HTTP status. A later
one is an event `{"error": ...}`, after which the stream ends without `[DONE]`.
"""

from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from contextlib import aclosing
from typing import Any, Generic, Protocol, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from loraplex.core.output import RequestOutput
from loraplex.frontends.openai.errors import OPENAI_ERRORS, ErrorWriter, as_loraplex_error
from loraplex.frontends.streams import (
    ClientDisconnectedError,
    IndexedOutput,
    until_disconnect,
    written,
)

T_contra = TypeVar("T_contra", contravariant=True)
OutputT = TypeVar("OutputT")

DONE = b"data: [DONE]\n\n"


class ChunkWriter(Protocol[T_contra]):
    """Turns outputs into the chunks of one response."""

    def headers(self, first: T_contra) -> Mapping[str, str]:
        """Response headers that the first output determines."""
        ...

    def chunks(self, output: T_contra) -> Iterable[msgspec.Struct]: ...

    def last_chunks(self) -> Iterable[msgspec.Struct]:
        """What follows the last output."""
        ...


def event(chunk: msgspec.Struct) -> bytes:
    """One event. JSON has no raw line break, so one data line holds it."""
    return b"data: " + msgspec.json.encode(chunk) + b"\n\n"


def nothing(_output: Any) -> tuple[RequestOutput, ...]:
    return ()


def just_output(item: IndexedOutput) -> tuple[RequestOutput, ...]:
    return (item[1],)


class EventStream(Response, Generic[OutputT]):
    """Streams outputs as events; closes them as soon as the client has gone."""

    media_type = "text/event-stream"

    def __init__(
        self,
        outputs: AsyncGenerator[OutputT, None],
        writer: ChunkWriter[OutputT],
        request_id: str,
        errors: ErrorWriter = OPENAI_ERRORS,
        end: bytes = DONE,
        encode: Callable[[Any], bytes] = event,
        read_from: Callable[[OutputT], tuple[RequestOutput, ...]] = nothing,
    ) -> None:
        """end: what is sent after the last event of a stream without error; encode: a chunk as
        an event; read_from: what of an output has a text in which the writer looks for calls."""
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._outputs = outputs
        self._writer = writer
        self._request_id = request_id
        self._errors = errors
        self._end = end
        self._event = encode
        self._read_from = read_from

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await until_disconnect(receive, self._send_all(scope, receive, send))
        except ClientDisconnectedError:
            return

    async def _send_all(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._outputs) as outputs:
            try:
                first = await anext(outputs)
            except Exception as error:
                response = self._errors.response(as_loraplex_error(error, self._request_id))
                response.headers["x-request-id"] = self._request_id
                await response(scope, receive, send)
                return
            self.headers.update(self._writer.headers(first))
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async with aclosing(self._events(first, outputs)) as events:
                async for data in events:
                    await send({"type": "http.response.body", "body": data, "more_body": True})
            await send({"type": "http.response.body", "body": b""})

    async def _events(
        self, first: OutputT, outputs: AsyncGenerator[OutputT, None]
    ) -> AsyncGenerator[bytes, None]:
        try:
            yield await self._written(first)
            async for output in outputs:
                if data := await self._written(output):
                    yield data
            yield self._encode(self._writer.last_chunks()) + self._end
        except Exception as error:
            yield self._encode(self._errors.events(as_loraplex_error(error, self._request_id)))

    async def _written(self, output: OutputT) -> bytes:
        return await written(
            lambda: self._encode(self._writer.chunks(output)), *self._read_from(output)
        )

    def _encode(self, chunks: Iterable[msgspec.Struct]) -> bytes:
        return b"".join(map(self._event, chunks))
