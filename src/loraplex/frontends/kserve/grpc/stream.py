"""One ModelStreamInfer call: many requests at a time, one sequence of responses."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable
from contextlib import aclosing
from typing import Any

from loraplex.core.principal import Principal
from loraplex.frontends.kserve.active import StreamScope
from loraplex.frontends.kserve.errors import as_loraplex_error, message_of, status_of
from loraplex.frontends.kserve.failures import FailedAnswer
from loraplex.frontends.kserve.grpc.bridge import LoopBridge
from loraplex.frontends.kserve.grpc.codec import decode_request, encode_failure, encode_piece
from loraplex.frontends.kserve.service import ResponseStream, TritonService
from loraplex.frontends.kserve.shared_memory import TenantMemory
from loraplex.serving.wire_request import as_current, current_request

_OK, _CANCELLED = "OK", "CANCELLED"
MAX_PENDING_RESPONSES = 64
"""Responses of one stream that wait for a slow client; then its requests wait, others do not."""


class StreamSession:
    def __init__(
        self,
        service: TritonService,
        bridge: LoopBridge,
        principal: Principal,
        *,
        errors_end_stream: bool,
    ) -> None:
        self._service = service
        self._bridge = bridge
        self._principal = principal
        self._errors_end_stream = errors_end_stream
        self._scope = StreamScope()
        self._pending: asyncio.Queue[Any] = asyncio.Queue(MAX_PENDING_RESPONSES)

    async def responses(self, requests: AsyncIterator[Any]) -> AsyncGenerator[Any, None]:
        """ModelStreamInferResponses, until every request is answered and no more can come.

        Raises the first error if errors end the stream. Closing it aborts all requests.
        """
        serving = asyncio.ensure_future(self._serve_all(requests))
        try:
            while (item := await self._pending.get()) is not None:
                if isinstance(item, Exception):
                    raise item
                yield item
        finally:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)

    async def _serve_all(self, requests: AsyncIterator[Any]) -> None:
        """Serve the requests as they come; then put the end, which is an error or None."""
        end: Exception | None = None
        try:
            async with asyncio.TaskGroup() as tasks:
                async for request in requests:
                    tasks.create_task(self._serve(request))
        except* Exception as group:
            end = group.exceptions[0]
        await self._pending.put(end)

    async def _serve(self, request: Any) -> None:
        """Serve one request, which is told of by itself."""
        stream = current_request()
        assert stream is not None, "the interceptor is around every call"
        part, status = stream.within(), _CANCELLED
        try:
            with as_current(part):
                await self._answer(request)
            status = _OK if part.error is None else status_of(part.error).grpc
        finally:
            part.end(status)

    async def _answer(self, request: Any) -> None:
        """Its error is an answer, unless errors end the stream."""
        try:
            memory = TenantMemory(self._service.memory, self._principal.tenant)
            infer_request, wishes = decode_request(request, memory)

            def open_stream() -> Awaitable[ResponseStream]:
                return self._service.stream(infer_request, self._principal, self._scope)

            async with aclosing(self._bridge.iterate(open_stream)) as responses:
                async for response in responses:
                    await self._pending.put(encode_piece(response, wishes))
        except Exception as raised:
            if self._errors_end_stream:
                raise
            error = as_loraplex_error(raised)
            outputs = raised.outputs if isinstance(raised, FailedAnswer) else ()
            await self._pending.put(encode_failure(request, message_of(error), outputs))
