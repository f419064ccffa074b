"""The RPCs of inference.GRPCInferenceService. All of it runs on gRPC's loop.

The service is called through the bridge only. Method names are the protocol's.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

import grpc
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from loraplex.core.errors import UnsupportedFeatureError
from loraplex.frontends.kserve.access import Authenticate
from loraplex.frontends.kserve.errors import as_loraplex_error, message_of, status_of
from loraplex.frontends.kserve.grpc.bridge import LoopBridge
from loraplex.frontends.kserve.grpc.codec import decode_request, encode_response
from loraplex.frontends.kserve.grpc.stream import StreamSession
from loraplex.frontends.kserve.models.catalog import server_metadata
from loraplex.frontends.kserve.service import TritonService

T = TypeVar("T")
Context = Any
Rpc = Callable[[Any, Any, Context], Coroutine[Any, Any, Any]]

ERRORS_END_STREAM = "triton_grpc_error"
"""Call metadata: "true" asks for a gRPC status instead of an error message in the stream."""


def _unserved(text: str) -> Rpc:
    """An RPC that we do not serve, and why."""

    async def refuse(self: Any, request: Any, context: Context) -> None:
        del self, request
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, text)

    return refuse


class TritonServicer(service_pb2_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]
    def __init__(
        self, service: TritonService, bridge: LoopBridge, authenticate: Authenticate
    ) -> None:
        self._service = service
        self._bridge = bridge
        self._authenticate = authenticate

    # ------------------------------------------------------------ server and models

    async def ServerLive(self, request: Any, context: Context) -> Any:
        del request
        health = await self._ask(context, self._service.backend.health)
        return pb.ServerLiveResponse(live=health.live)

    async def ServerReady(self, request: Any, context: Context) -> Any:
        del request
        health = await self._ask(context, self._service.backend.health)
        return pb.ServerReadyResponse(ready=health.ready)

    async def ModelReady(self, request: Any, context: Context) -> Any:
        catalog = self._service.catalog
        is_ready = await self._ask(context, lambda: catalog.is_ready(request.name, request.version))
        return pb.ModelReadyResponse(ready=is_ready)

    async def ServerMetadata(self, request: Any, context: Context) -> Any:
        del request, context
        return pb.ServerMetadataResponse(**server_metadata())

    async def ModelMetadata(self, request: Any, context: Context) -> Any:
        catalog = self._service.catalog
        model = await self._ask(context, lambda: catalog.find(request.name, request.version))
        return pb.ModelMetadataResponse(**model.metadata())

    async def ModelConfig(self, request: Any, context: Context) -> Any:
        catalog = self._service.catalog
        model = await self._ask(context, lambda: catalog.find(request.name, request.version))
        return pb.ModelConfigResponse(config=model.config())

    async def ModelStatistics(self, request: Any, context: Context) -> Any:
        rows = await self._ask(
            context, lambda: self._service.statistics(request.name, request.version)
        )
        return pb.ModelStatisticsResponse(model_stats=rows)

    async def RepositoryIndex(self, request: Any, context: Context) -> Any:
        rows = await self._ask(context, lambda: self._index(request))
        return pb.RepositoryIndexResponse(models=rows)

    def _index(self, request: Any) -> list[dict[str, str]]:
        if request.repository_name:
            raise UnsupportedFeatureError("'repository_name' specification is not supported")
        return self._service.catalog.index(only_ready=request.ready)

    # ------------------------------------------------------------ inference

    async def ModelInfer(self, request: Any, context: Context) -> Any:
        return await _or_abort(context, self._infer(request, context))

    async def _infer(self, request: Any, context: Context) -> Any:
        principal = self._authenticate(_metadata(context))
        work = self._service.infer(decode_request(request), principal)
        return encode_response(await self._bridge.call(work))

    async def ModelStreamInfer(self, requests: AsyncIterator[Any], context: Context) -> None:
        """Requests of one stream run at the same time; their answers come as they are ready."""
        await _or_abort(context, self._stream(requests, context))

    async def _stream(self, requests: AsyncIterator[Any], context: Context) -> None:
        metadata = _metadata(context)
        session = StreamSession(
            self._service,
            self._bridge,
            self._authenticate(metadata),
            errors_end_stream=metadata.get(ERRORS_END_STREAM) == "true",
        )
        async with aclosing(session.responses(requests)) as responses:
            async for response in responses:
                await context.write(response)

    # ------------------------------------------------------------ what is not served

    RepositoryModelLoad = _unserved("models are fixed while the server runs")
    RepositoryModelUnload = _unserved("models are fixed while the server runs")
    SystemSharedMemoryStatus = _unserved("shared memory is not served; send tensors in the request")
    SystemSharedMemoryRegister = SystemSharedMemoryStatus
    SystemSharedMemoryUnregister = SystemSharedMemoryStatus
    CudaSharedMemoryStatus = SystemSharedMemoryStatus
    CudaSharedMemoryRegister = SystemSharedMemoryStatus
    CudaSharedMemoryUnregister = SystemSharedMemoryStatus
    TraceSetting = _unserved("tracing is not served")
    LogSettings = _unserved("log settings are fixed while the server runs")

    async def _ask(self, context: Context, question: Callable[[], T]) -> T:
        """The answer to a plain question, asked on the backend's loop."""

        async def ask() -> T:
            return question()

        return await _or_abort(context, self._bridge.call(ask()))


async def _or_abort(context: Context, work: Awaitable[T]) -> T:
    try:
        return await work
    except Exception as raised:
        await _abort(context, raised)
        raise


def _metadata(context: Context) -> dict[str, str]:
    """The call's text metadata; values of binary keys are left out."""
    pairs = context.invocation_metadata() or ()
    return {key: value for key, value in pairs if isinstance(value, str)}


async def _abort(context: Context, raised: Exception) -> None:
    """End the call with the error's status. Always raises."""
    error = as_loraplex_error(raised)
    await context.abort(grpc.StatusCode[status_of(error).grpc], message_of(error))
