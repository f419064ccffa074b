"""grpc.health.v1.Health, for Kubernetes and load balancers. The server's name is not checked,
as in Triton: every name means the whole server, which serves when it is ready.

Source: the gRPC health checking protocol. Its two messages are made here, in a pool of their own.
"""

import asyncio
from collections.abc import Callable
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from loraplex.frontends.kserve.grpc.calls import Rpc, RpcCall

SERVICE = "grpc.health.v1.Health"
SERVING = 1
NOT_SERVING = 2
WATCH_SECONDS = 0.5
"""Seconds between two checks for the watchers."""

IsReady = Callable[[], bool]


def _messages() -> tuple[Any, Any]:
    """(HealthCheckRequest, HealthCheckResponse)"""
    field = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(
        name="grpc/health/v1/health.proto", package="grpc.health.v1", syntax="proto3"
    )
    request = file.message_type.add(name="HealthCheckRequest")
    request.field.add(name="service", number=1, type=field.TYPE_STRING, label=field.LABEL_OPTIONAL)
    response = file.message_type.add(name="HealthCheckResponse")
    statuses = response.enum_type.add(name="ServingStatus")
    for number, name in enumerate(("UNKNOWN", "SERVING", "NOT_SERVING", "SERVICE_UNKNOWN")):
        statuses.value.add(name=name, number=number)
    response.field.add(
        name="status",
        number=1,
        type=field.TYPE_ENUM,
        type_name=".grpc.health.v1.HealthCheckResponse.ServingStatus",
        label=field.LABEL_OPTIONAL,
    )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    classes = [
        message_factory.GetMessageClass(pool.FindMessageTypeByName(f"grpc.health.v1.{name}"))
        for name in ("HealthCheckRequest", "HealthCheckResponse")
    ]
    return classes[0], classes[1]


HealthCheckRequest, HealthCheckResponse = _messages()


class _Watchers:
    """One task checks for all of them, and they sleep meanwhile: no key is needed here, and a
    thousand watchers must not cost more than one."""

    def __init__(self, is_ready: IsReady) -> None:
        self._is_ready = is_ready
        self._waiting: dict[asyncio.Future[bool], bool] = {}
        """What each of them knows."""
        self._looking: asyncio.Task[None] | None = None

    async def other_than(self, known: bool) -> bool:
        """What is so as soon as it is not what a watcher knows."""
        future: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiting[future] = known
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look())
        try:
            return await future
        finally:
            del self._waiting[future]

    async def _look(self) -> None:
        while self._waiting:
            await asyncio.sleep(WATCH_SECONDS)
            now = self._is_ready()
            for future, known in self._waiting.items():
                if now is not known and not future.done():
                    future.set_result(now)


def health_rpcs(is_ready: IsReady) -> tuple[Rpc, Rpc]:
    """Check and Watch."""
    watchers = _Watchers(is_ready)

    async def check(request: Any, call: RpcCall) -> Any:
        del request, call
        return _status(is_ready())

    async def watch(request: Any, call: RpcCall) -> None:
        """The status, and then each other one, until the client goes."""
        del request
        now = is_ready()
        while True:
            await call.write(_status(now))
            now = await watchers.other_than(now)

    return (
        Rpc(
            name=f"/{SERVICE}/Check",
            behavior=check,
            response=HealthCheckResponse,
        ),
        Rpc(
            name=f"/{SERVICE}/Watch",
            behavior=watch,
            response=HealthCheckResponse,
            streams_responses=True,
        ),
    )


def _status(ready: bool) -> Any:
    return HealthCheckResponse(status=SERVING if ready else NOT_SERVING)
