"""The RPCs beside inference: shared memory, settings, and which models are loaded.

A part of the servicer. Method names are the protocol's.
"""

import math
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import grpc
from tritonclient.grpc import service_pb2 as pb

from loraplex.core.principal import Principal
from loraplex.core.support import Support, tells
from loraplex.frontends.access import Authenticate
from loraplex.frontends.kserve.errors import as_loraplex_error, message_of, status_of
from loraplex.frontends.kserve.grpc.bridge import LoopBridge
from loraplex.frontends.kserve.service import TritonService
from loraplex.frontends.kserve.shared_memory import (
    USE_SHARED_MEMORY,
    no_cuda_region,
    refuse_cuda,
)

T = TypeVar("T")
RETRY_AFTER = "retry-after"
"""Trailing metadata: seconds, as HTTP's header of the name has them."""
Context = Any


class AdminRpcs:
    def __init__(
        self, service: TritonService, bridge: LoopBridge, authenticate: Authenticate
    ) -> None:
        self._service = service
        self._bridge = bridge
        self._authenticate = authenticate

    # ------------------------------------------------------------ shared memory

    async def SystemSharedMemoryStatus(self, request: Any, context: Context) -> Any:
        regions = await self._by(
            context, lambda who: self._service.memory.status(_with_memory(who), request.name)
        )
        answer = pb.SystemSharedMemoryStatusResponse()
        for each in regions:
            row = answer.regions[each.name]
            row.name, row.key = each.name, each.key
            row.offset, row.byte_size = each.offset, each.byte_size
        return answer

    async def SystemSharedMemoryRegister(self, request: Any, context: Context) -> Any:
        def register(who: Principal) -> None:
            self._service.memory.register(
                _with_memory(who), request.name, request.key, request.offset, request.byte_size
            )

        await self._by(context, register)
        return pb.SystemSharedMemoryRegisterResponse()

    async def SystemSharedMemoryUnregister(self, request: Any, context: Context) -> Any:
        await self._by(
            context, lambda who: self._service.memory.unregister(_with_memory(who), request.name)
        )
        return pb.SystemSharedMemoryUnregisterResponse()

    @tells("there is no region", Support.NO_EFFECT)
    async def CudaSharedMemoryStatus(self, request: Any, context: Context) -> Any:
        if request.name:
            await self._by(context, lambda _: no_cuda_region(request.name))
        return pb.CudaSharedMemoryStatusResponse()

    @tells("use system shared memory", Support.REFUSED)
    async def CudaSharedMemoryRegister(self, request: Any, context: Context) -> Any:
        del request
        await self._by(context, lambda _: refuse_cuda())

    @tells("there is no region", Support.NO_EFFECT)
    async def CudaSharedMemoryUnregister(self, request: Any, context: Context) -> Any:
        del request
        await self._by(context, lambda _: None)
        return pb.CudaSharedMemoryUnregisterResponse()

    # ------------------------------------------------------------ settings

    @tells("kept and told; nothing is traced by it", Support.NO_EFFECT)
    async def TraceSetting(self, request: Any, context: Context) -> Any:
        changes = {name: list(each.value) or None for name, each in request.settings.items()}
        settings = await self._by(
            context,
            lambda who: self._service.management.change_trace(who, request.model_name, changes),
        )
        answer = pb.TraceSettingResponse()
        for name, value in settings.items():
            answer.settings[name].value.extend(value if isinstance(value, list) else [value])
        return answer

    async def LogSettings(self, request: Any, context: Context) -> Any:
        changes = _parameters(request.settings)
        settings = await self._by(
            context, lambda who: self._service.management.change_log(who, changes)
        )
        answer = pb.LogSettingsResponse()
        for name, value in settings.items():
            match value:
                case bool():
                    answer.settings[name].bool_param = value
                case int():
                    answer.settings[name].uint32_param = value
                case str():
                    answer.settings[name].string_param = value
        return answer

    # ------------------------------------------------------------ the repository

    @tells("a repository's name is refused")
    async def RepositoryIndex(self, request: Any, context: Context) -> Any:
        index = self._service.management.index
        rows = await self._by(
            context, lambda who: index(who, request.repository_name, only_ready=request.ready)
        )
        return pb.RepositoryIndexResponse(models=rows)

    @tells("with --model-control-mode explicit")
    async def RepositoryModelLoad(self, request: Any, context: Context) -> Any:
        parameters = _parameters(request.parameters)
        load = self._service.management.load
        await self._by(
            context,
            lambda who: load(who, request.repository_name, request.model_name, parameters),
        )
        return pb.RepositoryModelLoadResponse()

    @tells("with --model-control-mode explicit")
    async def RepositoryModelUnload(self, request: Any, context: Context) -> Any:
        parameters = _parameters(request.parameters)
        unload = self._service.management.unload
        await self._by(
            context,
            lambda who: unload(who, request.repository_name, request.model_name, parameters),
        )
        return pb.RepositoryModelUnloadResponse()

    # ------------------------------------------------------------ how they are asked

    async def _by(self, context: Context, work: Callable[[Principal], T]) -> T:
        """What work gives for the caller, done on the backend's loop."""

        async def ask() -> T:
            return work(self._authenticate(metadata_of(context)))

        return await or_abort(context, self._bridge.call(ask()))


def _with_memory(principal: Principal) -> str:
    """The tenant. Raises PermissionDeniedError."""
    principal.require_operator(USE_SHARED_MEMORY)
    return principal.tenant


def _parameters(messages: Any) -> dict[str, object]:
    """The values of oneofs; one without a value is None."""
    choices = {name: message.WhichOneof("parameter_choice") for name, message in messages.items()}
    return {
        name: None if choice is None else getattr(messages[name], choice)
        for name, choice in choices.items()
    }


async def or_abort(context: Context, work: Awaitable[T]) -> T:
    """The result of work; its error ends the call with the error's status."""
    try:
        return await work
    except Exception as raised:
        error = as_loraplex_error(raised)
        if error.retry_after_seconds is not None:
            seconds = str(max(1, math.ceil(error.retry_after_seconds)))
            context.set_trailing_metadata(((RETRY_AFTER, seconds),))
        await context.abort(grpc.StatusCode[status_of(error).grpc], message_of(error))
        raise


def metadata_of(context: Context) -> dict[str, str]:
    """The call's text metadata; values of binary keys are left out."""
    pairs = context.invocation_metadata() or ()
    return {key: value for key, value in pairs if isinstance(value, str)}
