"""Server-sent events: one JSON chunk an event, `[DONE]` at the end, and what happens in between.

The status line waits for the first output, so an error up to then has its own HTTP status. A later
one is an event `{"error": ...}`, after which the stream ends without `[DONE]`.
"""

from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from contextlib import aclosing
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from loraplex.frontends.direct_writes import DIRECT, DirectWriter
from loraplex.frontends.long_json import encoded
from loraplex.frontends.openai.errors import OPENAI_ERRORS, ErrorWriter, as_loraplex_error
from loraplex.frontends.streams import (
    ClientDisconnectedError,
    IndexedOutput,
    done,
    until_disconnect,
    writing_work,
)
from loraplex.serving.backend import ReadyOutputs

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
    return b"".join((b"data: ", *encoded(chunk), b"\n\n"))


class EventTemplate:
    """An event whose text alone changes: a stream has thousands of them."""

    def __init__(self, chunk: msgspec.Struct, field: str) -> None:
        """chunk: one whose text is empty; field: the name of the text, which only one object in the
        chunk has."""
        self._name = f'"{field}":'.encode()
        # In a string the quotes would be escaped: this is the field, not a client's text.
        self._before, self._after = event(chunk).split(self._name + b'""')

    def with_text(self, text: str) -> bytes:
        return b"".join((self._before, self._name, msgspec.json.encode(text), self._after))


@runtime_checkable
class TextEventWriter(Protocol[T_contra]):
    """A ChunkWriter that has a shorter way for outputs with nothing but text."""

    def text_events(self, output: T_contra) -> bytes | None:
        """Return the events of the chunks of an output that does not end a sequence.

        None, and no change: the chunks may have more than text. The last chunks repeat nothing of
        such outputs.
        """
        ...


def no_events(_output: Any) -> None:
    """The text_events of a writer without them."""


def no_work(_output: Any) -> int:
    return 0


def output_work(item: IndexedOutput) -> int:
    return writing_work(item[1])


class ChunkStream(Response, Generic[OutputT]):
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
        work_of: Callable[[OutputT], int] = no_work,
        ready: ReadyOutputs[OutputT] | None = None,
    ) -> None:
        """end: what is sent after the last event of a stream without error; encode: a chunk as
        an event; work_of: how long an output takes to format, from `writing_work`; ready: the same
        outputs, where they can be read without a task."""
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._outputs = outputs
        self._writer = writer
        self._request_id = request_id
        self._errors = errors
        self._end = end
        self._event = encode
        self._work_of = work_of
        self._work = 0
        """Work of all outputs: the last chunks may repeat what they have."""

        self._text_events: Callable[[OutputT], bytes | None] = no_events
        if isinstance(writer, TextEventWriter) and encode is event:
            self._text_events = writer.text_events
        self._ready = ready
        self._direct: DirectWriter | None = None
        """The connection, once the response has begun, if it takes parts without a task."""

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
            self._direct = scope.get(DIRECT)
            if self._ready is not None:
                self._ready.when_ready(self._write_ready)
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
            last = await done(lambda: self._encode(self._writer.last_chunks()), self._work)
            yield last + self._end
        except Exception as error:
            yield self._encode(self._errors.events(as_loraplex_error(error, self._request_id)))

    def _write_ready(self) -> bool:
        """Write an output that has just come; return False to leave it to the task.

        The task waits for outputs then, and so it is sending none.
        """
        if self._ready is None or self._direct is None or not self._direct.is_writable:
            return False
        output = self._ready.take_ready()
        if output is None:
            return False
        data = self._text_events(output)
        if data is None:
            self._work += self._work_of(output)
            data = self._encode(self._writer.chunks(output))
        if data:
            self._direct.write(data)
        return True

    async def _written(self, output: OutputT) -> bytes:
        work = self._work_of(output)
        self._work += work
        return await done(lambda: self._encode(self._writer.chunks(output)), work)

    def _encode(self, chunks: Iterable[msgspec.Struct]) -> bytes:
        return b"".join(map(self._event, chunks))
