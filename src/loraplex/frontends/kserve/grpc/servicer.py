"""The RPCs of inference.GRPCInferenceService. Method names are the protocol's."""

from collections.abc import AsyncIterator, Iterator
from typing import Any

from google.protobuf.message_factory import GetMessageClass
from tritonclient.grpc import service_pb2 as pb

from loraplex.frontends.body_limits import off_loop
from loraplex.frontends.kserve.grpc.admin import AdminRpcs
from loraplex.frontends.kserve.grpc.calls import Rpc, RpcCall
from loraplex.frontends.kserve.grpc.codec import (
    decode_request,
    encode_response,
    infer_reader,
)
from loraplex.frontends.kserve.grpc.stream import StreamSession
from loraplex.frontends.kserve.grpc.wire import MessageReader
from loraplex.frontends.kserve.models.catalog import server_metadata
from loraplex.frontends.kserve.service import TritonService
from loraplex.frontends.kserve.shared_memory import TenantMemory

SERVICE = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"]


_INFER = ("ModelInfer", "ModelStreamInfer")


class TritonServicer(AdminRpcs):
    def __init__(self, service: TritonService, max_values: int) -> None:
        """Create a servicer. max_values: maximum number of repeated numbers in a message."""
        super().__init__(service)
        self._max_values = max_values
        self._infer_reader = infer_reader(max_values)

    def rpcs(self) -> Iterator[Rpc]:
        """Those of the protocol that are here; gRPC refuses the others itself."""
        for method in SERVICE.methods:
            behavior = getattr(self, method.name, None)
            if behavior is not None:
                yield Rpc(
                    name=f"/{SERVICE.full_name}/{method.name}",
                    behavior=behavior,
                    response=GetMessageClass(method.output_type),
                    reader=None if method.name in _INFER else self._reader(method),
                    streams_requests=method.client_streaming,
                    streams_responses=method.server_streaming,
                )

    def _reader(self, method: Any) -> MessageReader:
        return MessageReader(GetMessageClass(method.input_type), self._max_values)

    # ------------------------------------------------------------ server and models

    async def ServerLive(self, request: Any, call: RpcCall) -> Any:
        del request, call
        return pb.ServerLiveResponse(live=self._service.backend.health().live)

    async def ServerReady(self, request: Any, call: RpcCall) -> Any:
        del request, call
        return pb.ServerReadyResponse(ready=self.is_ready())

    async def ModelReady(self, request: Any, call: RpcCall) -> Any:
        ready = self._service.catalog.is_ready(request.name, request.version, call.principal)
        return pb.ModelReadyResponse(ready=ready)

    async def ServerMetadata(self, request: Any, call: RpcCall) -> Any:
        del request, call
        return pb.ServerMetadataResponse(**server_metadata())

    async def ModelMetadata(self, request: Any, call: RpcCall) -> Any:
        model = self._service.catalog.find(request.name, request.version, call.principal)
        return pb.ModelMetadataResponse(**model.metadata())

    async def ModelConfig(self, request: Any, call: RpcCall) -> Any:
        model = self._service.catalog.find(request.name, request.version, call.principal)
        return pb.ModelConfigResponse(config=model.config())

    async def ModelStatistics(self, request: Any, call: RpcCall) -> Any:
        rows = self._service.statistics(request.name, request.version, call.principal)
        return pb.ModelStatisticsResponse(model_stats=rows)

    # ------------------------------------------------------------ inference

    async def ModelInfer(self, data: bytes, call: RpcCall) -> Any:
        memory = TenantMemory(self._service.memory, call.principal.tenant)
        infer_request, wishes = decode_request(*await self._infer_reader.read(data), memory)
        named = infer_request.model, infer_request.version
        self._service.catalog.find(*named, call.principal, end_point="ModelInfer RPC")
        response = await self._service.infer(infer_request, call.principal)
        call.responses.count(response.num_bytes)
        return await off_loop(response.num_bytes, lambda: encode_response(response, wishes))

    async def ModelStreamInfer(self, requests: AsyncIterator[bytes], call: RpcCall) -> None:
        """Requests of one stream run at the same time; their responses come as they are ready."""
        await StreamSession(self._service, call, self._infer_reader).serve(requests)

    def is_ready(self) -> bool:
        """Whether the whole server is ready."""
        return self._service.backend.health().ready
