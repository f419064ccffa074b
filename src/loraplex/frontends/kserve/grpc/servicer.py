"""The RPCs of inference.GRPCInferenceService. Method names are the protocol's."""

import asyncio
import functools
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from typing import Any

from google.protobuf.message_factory import GetMessageClass
from tritonclient.grpc import service_pb2 as pb

from loraplex.core.support import Support, support_note
from loraplex.frontends.body_limits import BodyLease, off_loop
from loraplex.frontends.kserve.errors import (
    FailedResponse,
    as_loraplex_error,
    message_of,
    status_of,
)
from loraplex.frontends.kserve.grpc.calls import Rpc, RpcCall
from loraplex.frontends.kserve.grpc.codec import (
    decode_request,
    encode_failure,
    encode_piece,
    encode_response,
    infer_reader,
)
from loraplex.frontends.kserve.grpc.wire import MessageReader
from loraplex.frontends.kserve.inference import StreamScope
from loraplex.frontends.kserve.models.catalog import server_metadata
from loraplex.frontends.kserve.service import TritonService
from loraplex.frontends.kserve.shared_memory import (
    TenantMemory,
    no_cuda_region,
    refuse_cuda,
    tenant_with_memory,
)
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


SERVICE = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"]


_INFER = ("ModelInfer", "ModelStreamInfer")


class TritonServicer:
    def __init__(self, service: TritonService, max_values: int) -> None:
        """Create a servicer. max_values: maximum number of repeated numbers in a message."""
        self._service = service
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
        return pb.ModelConfigResponse(config=model.configuration())

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

    # ------------------------------------------------------------ shared memory

    async def SystemSharedMemoryStatus(self, request: Any, call: RpcCall) -> Any:
        regions = self._service.memory.status(tenant_with_memory(call.principal), request.name)
        response = pb.SystemSharedMemoryStatusResponse()
        for each in regions:
            row = response.regions[each.name]
            row.name, row.key = each.name, each.key
            row.offset, row.byte_size = each.offset, each.byte_size
        return response

    async def SystemSharedMemoryRegister(self, request: Any, call: RpcCall) -> Any:
        tenant = tenant_with_memory(call.principal)
        self._service.memory.register(
            tenant, request.name, request.key, request.offset, request.byte_size
        )
        return pb.SystemSharedMemoryRegisterResponse()

    async def SystemSharedMemoryUnregister(self, request: Any, call: RpcCall) -> Any:
        self._service.memory.unregister(tenant_with_memory(call.principal), request.name)
        return pb.SystemSharedMemoryUnregisterResponse()

    @support_note("there is no region", Support.NO_EFFECT)
    async def CudaSharedMemoryStatus(self, request: Any, call: RpcCall) -> Any:
        del call
        if request.name:
            no_cuda_region(request.name)
        return pb.CudaSharedMemoryStatusResponse()

    @support_note("use system shared memory", Support.REFUSED)
    async def CudaSharedMemoryRegister(self, request: Any, call: RpcCall) -> Any:
        del request, call
        refuse_cuda()

    @support_note("there is no region", Support.NO_EFFECT)
    async def CudaSharedMemoryUnregister(self, request: Any, call: RpcCall) -> Any:
        del request, call
        return pb.CudaSharedMemoryUnregisterResponse()

    # ------------------------------------------------------------ settings

    @support_note("kept and returned; nothing is traced by it", Support.NO_EFFECT)
    async def TraceSetting(self, request: Any, call: RpcCall) -> Any:
        changes = {name: list(each.value) or None for name, each in request.settings.items()}
        settings = self._service.management.change_trace(
            call.principal, request.model_name, changes
        )
        response = pb.TraceSettingResponse()
        for name, value in settings.items():
            response.settings[name].value.extend(value if isinstance(value, list) else [value])
        return response

    async def LogSettings(self, request: Any, call: RpcCall) -> Any:
        changes = _parameters(request.settings)
        settings = self._service.management.change_log(call.principal, changes)
        response = pb.LogSettingsResponse()
        for name, value in settings.items():
            match value:
                case bool():
                    response.settings[name].bool_param = value
                case int():
                    response.settings[name].uint32_param = value
                case str():
                    response.settings[name].string_param = value
        return response

    # ------------------------------------------------------------ the repository

    @support_note("a repository's name is refused")
    async def RepositoryIndex(self, request: Any, call: RpcCall) -> Any:
        rows = self._service.management.index(
            call.principal, request.repository_name, only_ready=request.ready
        )
        return pb.RepositoryIndexResponse(models=rows)

    @support_note("with --model-control-mode explicit")
    async def RepositoryModelLoad(self, request: Any, call: RpcCall) -> Any:
        parameters = _parameters(request.parameters)
        await self._service.management.load(
            call.principal, request.repository_name, request.model_name, parameters
        )
        return pb.RepositoryModelLoadResponse()

    @support_note("with --model-control-mode explicit")
    async def RepositoryModelUnload(self, request: Any, call: RpcCall) -> Any:
        parameters = _parameters(request.parameters)
        self._service.management.unload(
            call.principal, request.repository_name, request.model_name, parameters
        )
        return pb.RepositoryModelUnloadResponse()


def _parameters(messages: Any) -> dict[str, object]:
    """The values of oneofs; one without a value is None."""
    choices = {name: message.WhichOneof("parameter_choice") for name, message in messages.items()}
    return {
        name: None if choice is None else getattr(messages[name], choice)
        for name, choice in choices.items()
    }
