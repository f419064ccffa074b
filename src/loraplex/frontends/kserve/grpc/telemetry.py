"""Around every RPC: the request's id and trace, and its end in the access log."""

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import unquote

import grpc

from loraplex.frontends.telemetry.request_ids import HEADER
from loraplex.frontends.telemetry.telemetry import Telemetry
from loraplex.serving.wire_request import as_current

Context = Any
_OK, _CANCELLED, _UNKNOWN = "OK", "CANCELLED", "UNKNOWN"


class RequestInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any
    ) -> Any:
        """The RPC's own handler, observed; None for an RPC that is not there."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        name = handler_call_details.method
        behavior, make = _parts(handler)
        wrap = self._observed_stream if inspect.isasyncgenfunction(behavior) else self._observed
        return make(
            wrap(name, behavior),
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )

    def _observed(self, name: str, behavior: Callable[..., Awaitable[Any]]) -> Any:
        async def observed(request: Any, context: Context) -> Any:
            with self._request(name, context):
                return await behavior(request, context)

        return observed

    def _observed_stream(self, name: str, behavior: Callable[..., AsyncIterator[Any]]) -> Any:
        async def observed(request: Any, context: Context) -> AsyncIterator[Any]:
            with self._request(name, context):
                async for response in behavior(request, context):
                    yield response

        return observed

    @contextmanager
    def _request(self, name: str, context: Context) -> Iterator[None]:
        metadata = context.invocation_metadata() or ()
        headers = {key: value for key, value in metadata if isinstance(value, str)}
        client = _address(context.peer())
        request = self._telemetry.begin("grpc", "", name, client, headers, route=name)
        # At the end of the call: an error's answer has no other metadata.
        context.set_trailing_metadata(((HEADER, request.request_id),))
        status = _UNKNOWN
        try:
            with as_current(request):
                yield
            status = _code(context) or _OK
        except (asyncio.CancelledError, GeneratorExit):
            status = _CANCELLED
            raise
        except BaseException:
            status = _code(context) or _UNKNOWN
            raise
        finally:
            request.end(status)


def _parts(handler: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """What a handler does, and how one of its kind is made."""
    if handler.request_streaming and handler.response_streaming:
        return handler.stream_stream, grpc.stream_stream_rpc_method_handler
    if handler.response_streaming:
        return handler.unary_stream, grpc.unary_stream_rpc_method_handler
    if handler.request_streaming:
        return handler.stream_unary, grpc.stream_unary_rpc_method_handler
    return handler.unary_unary, grpc.unary_unary_rpc_method_handler


def _code(context: Context) -> str:
    """The name of the code that was set, by an abort; empty if none was."""
    code = context.code()
    if isinstance(code, int):
        named = {each.value[0]: each.name for each in grpc.StatusCode}
        return named.get(code, _UNKNOWN) if code else ""
    return "" if code is None else str(code.name)


def _address(peer: str) -> str:
    """Of `ipv4:192.0.2.1:5000` or `ipv6:%5B::1%5D:5000`: the address."""
    kind, _, rest = peer.partition(":")
    if kind not in ("ipv4", "ipv6"):
        return peer
    return unquote(rest).rpartition(":")[0].strip("[]")
