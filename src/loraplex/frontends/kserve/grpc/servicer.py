"""The RPCs of inference.GRPCInferenceService. All of it runs on gRPC's loop.

The service is called through the bridge only. Method names are the protocol's.
"""

from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Any, TypeVar

from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from loraplex.frontends.kserve.grpc.admin import AdminRpcs, metadata_of, or_abort
from loraplex.frontends.kserve.grpc.codec import decode_request, encode_response
from loraplex.frontends.kserve.grpc.stream import StreamSession
from loraplex.frontends.kserve.messages import InferResponse
from loraplex.frontends.kserve.models.catalog import server_metadata
from loraplex.frontends.kserve.shared_memory import TenantMemory

T = TypeVar("T")
Context = Any

ERRORS_END_STREAM = "triton_grpc_error"
"""Call metadata: "true" asks for a gRPC status instead of an error message in the stream."""


class TritonServicer(AdminRpcs, service_pb2_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]
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
        is_ready = await self._by(
            context, lambda who: catalog.is_ready(request.name, request.version, who)
        )
        return pb.ModelReadyResponse(ready=is_ready)

    async def ServerMetadata(self, request: Any, context: Context) -> Any:
        del request, context
        return pb.ServerMetadataResponse(**server_metadata())

    async def ModelMetadata(self, request: Any, context: Context) -> Any:
        catalog = self._service.catalog
        model = await self._by(
            context, lambda who: catalog.find(request.name, request.version, who)
        )
        return pb.ModelMetadataResponse(**model.metadata())

    async def ModelConfig(self, request: Any, context: Context) -> Any:
        catalog = self._service.catalog
        model = await self._by(
            context, lambda who: catalog.find(request.name, request.version, who)
        )
        return pb.ModelConfigResponse(config=model.config())

    async def ModelStatistics(self, request: Any, context: Context) -> Any:
        rows = await self._by(
            context, lambda who: self._service.statistics(request.name, request.version, who)
        )
        return pb.ModelStatisticsResponse(model_stats=rows)

    # ------------------------------------------------------------ inference

    async def ModelInfer(self, request: Any, context: Context) -> Any:
        return await or_abort(context, self._infer(request, context))

    async def _infer(self, request: Any, context: Context) -> Any:
        principal = self._authenticate(metadata_of(context))
        memory = TenantMemory(self._service.memory, principal.tenant)
        infer_request, wishes = decode_request(request, memory)

        async def infer() -> InferResponse:
            self._service.check_is_unary(
                principal, request.model_name, request.model_version, "ModelInfer RPC"
            )
            return await self._service.infer(infer_request, principal)

        return encode_response(await self._bridge.call(infer()), wishes)

    async def ModelStreamInfer(self, requests: AsyncIterator[Any], context: Context) -> None:
        """Requests of one stream run at the same time; their answers come as they are ready."""
        await or_abort(context, self._stream(requests, context))

    async def _stream(self, requests: AsyncIterator[Any], context: Context) -> None:
        metadata = metadata_of(context)
        session = StreamSession(
            self._service,
            self._bridge,
            self._authenticate(metadata),
            errors_end_stream=metadata.get(ERRORS_END_STREAM) == "true",
        )
        async with aclosing(session.responses(requests)) as responses:
            async for response in responses:
                await context.write(response)

    async def is_ready(self) -> bool:
        """Whether the whole server would answer."""

        async def ask() -> bool:
            return self._service.backend.health().ready

        return await self._bridge.call(ask())

    async def _ask(self, context: Context, question: Callable[[], T]) -> T:
        """The answer to a plain question, asked on the backend's loop."""

        async def ask() -> T:
            return question()

        return await or_abort(context, self._bridge.call(ask()))
