"""One ModelStreamInfer call: many requests at a time, one sequence of responses."""

import asyncio
import functools
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from tritonclient.grpc import service_pb2 as pb

from loraplex.frontends.body_limits import BodyLease, off_loop
from loraplex.frontends.kserve.active import StreamScope
from loraplex.frontends.kserve.errors import (
    FailedResponse,
    as_loraplex_error,
    message_of,
    status_of,
)
from loraplex.frontends.kserve.grpc.calls import RpcCall
from loraplex.frontends.kserve.grpc.codec import decode_request, encode_failure, encode_piece
from loraplex.frontends.kserve.grpc.wire import MessageReader
from loraplex.frontends.kserve.service import TritonService
from loraplex.frontends.kserve.shared_memory import TenantMemory
from loraplex.serving.wire_request import as_current, current_request

ERRORS_END_STREAM = "triton_grpc_error"
"""Call metadata: "true" requests a gRPC status instead of an error message in the stream."""
_OK, _CANCELLED = "OK", "CANCELLED"


class StreamSession:
    """Each request is a task that writes its responses itself. Of a client that does not read no
    more than one response a request waits here: its source waits with it, and no other."""

    def __init__(self, service: TritonService, call: RpcCall, reader: MessageReader) -> None:
        self._service = service
        self._call = call
        self._reader = reader
        self._errors_end_stream = call.metadata.get(ERRORS_END_STREAM) == "true"
        self._scope = StreamScope()
        self._writing = asyncio.Lock()

    async def serve(self, requests: AsyncIterator[bytes]) -> None:
        """Serve the requests as they come, until all have ended and no more can come.

        Raises the first error if errors end the stream. Cancelling it aborts all requests.
        """
        error: Exception | None = None
        try:
            async with asyncio.TaskGroup() as tasks:
                async for request in requests:
                    tasks.create_task(self._serve(request))
        except* Exception as group:
            error = group.exceptions[0]
        if error is not None:
            raise error

    async def _serve(self, data: bytes) -> None:
        """Serve one request, which has a record of its own."""
        stream = current_request()
        assert stream is not None, "Calls is around every RPC"
        part, status = stream.within(), _CANCELLED
        try:
            with as_current(part), self._call.messages.lease() as lease:
                await self._respond(data, lease)
            status = _OK if part.error is None else status_of(part.error).grpc
        finally:
            part.end(status)

    async def _respond(self, data: bytes, lease: BodyLease) -> None:
        """Respond; an error is a response, unless errors end the stream."""
        request = pb.ModelInferRequest()
        try:
            lease.take(len(data))
            request, raw = await self._reader.read(data)
            memory = TenantMemory(self._service.memory, self._call.principal.tenant)
            infer_request, wishes = decode_request(request, raw, memory)
            responses = await self._service.stream(infer_request, self._call.principal, self._scope)
            async with aclosing(responses):
                async for response in responses:
                    encode = functools.partial(encode_piece, response, wishes)
                    await self._write(await off_loop(response.num_bytes, encode))
        except Exception as raised:
            if self._errors_end_stream:
                raise
            error = as_loraplex_error(raised)
            outputs = raised.outputs if isinstance(raised, FailedResponse) else ()
            await self._write(encode_failure(request, message_of(error), outputs))

    async def _write(self, response: Any) -> None:
        async with self._writing:
            await self._call.write(response)
