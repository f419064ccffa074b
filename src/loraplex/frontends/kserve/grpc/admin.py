"""RPCs other than inference: shared memory, settings, and which models are loaded.

A part of the servicer. Method names are the protocol's.
"""

from typing import Any

from tritonclient.grpc import service_pb2 as pb

from loraplex.core.support import Support, support_note
from loraplex.frontends.kserve.grpc.calls import RpcCall
from loraplex.frontends.kserve.service import TritonService
from loraplex.frontends.kserve.shared_memory import (
    no_cuda_region,
    refuse_cuda,
    tenant_with_memory,
)


class AdminRpcs:
    def __init__(self, service: TritonService) -> None:
        self._service = service

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
