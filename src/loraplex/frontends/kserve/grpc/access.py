"""The door of the gRPC port: without a valid key no RPC is begun, but for those about health."""

from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from loraplex.core.errors import LoraplexError
from loraplex.frontends.access import Authenticate
from loraplex.frontends.kserve.errors import message_of, status_of
from loraplex.serving.wire_request import note_error

_SERVICE = "/inference.GRPCInferenceService"
OPEN_RPCS = frozenset(
    {
        f"{_SERVICE}/ServerLive",
        f"{_SERVICE}/ServerReady",
        "/grpc.health.v1.Health/Check",
        "/grpc.health.v1.Health/Watch",
    }
)
"""What load balancers ask."""


class KeyInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """RPCs ask again who it is that they serve. That a new one forgets to does not open it."""

    def __init__(self, authenticate: Authenticate, *, health_is_open: bool = True) -> None:
        self._authenticate = authenticate
        self._open = OPEN_RPCS if health_is_open else frozenset()

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], details: Any
    ) -> Any:
        handler = await continuation(details)
        if handler is None or details.method in self._open:
            return handler
        pairs = details.invocation_metadata or ()
        try:
            self._authenticate({key: value for key, value in pairs if isinstance(value, str)})
        except LoraplexError as error:
            return _refusing(handler, error)
        return handler


def _refusing(handler: Any, error: LoraplexError) -> Any:
    """Of the same kind, as its client expects: unary or streamed."""

    async def refuse(request: Any, context: Any) -> None:
        del request
        note_error(error)
        await context.abort(grpc.StatusCode[status_of(error).grpc], message_of(error))

    ways = ("stream" if handler.request_streaming else "unary") + (
        "_stream" if handler.response_streaming else "_unary"
    )
    make = getattr(grpc, f"{ways}_rpc_method_handler")
    return make(refuse, handler.request_deserializer, handler.response_serializer)
