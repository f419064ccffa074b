"""Ray Serve application: replicas of a server, and an ingress that routes to them by adapter.

    serve run loraplex.deploy.ray:app model=FOLDER_OR_HUB_ID num_replicas=2

See docs/ray.md. It needs `pip install loraplex[ray]`.
"""

import asyncio
import contextlib
import logging
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from typing import Any, Final

import msgspec

from loraplex.core.errors import (
    ConfigError,
    EngineRestartedError,
    LoraplexError,
    PayloadTooLargeError,
    QueueFullError,
)

try:
    import ray
    from ray import serve
    from ray.serve.config import RequestRouterConfig
    from ray.serve.exceptions import BackPressureError
    from ray.serve.handle import DeploymentHandle
except ImportError as missing:
    raise ConfigError("Ray Serve is not installed: pip install 'loraplex[ray]'") from missing
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse

from loraplex.app.access import refusal
from loraplex.app.launch import set_up_logging, with_open_files
from loraplex.core.config import Config
from loraplex.deploy.arguments import Deployment, read_arguments
from loraplex.deploy.relay import (
    Body,
    HttpCall,
    Message,
    Relay,
    ReplicaLost,
    Start,
    called_path,
    decode_call,
    decode_messages,
)
from loraplex.deploy.relay import encode as encode_message
from loraplex.deploy.replica import started_replica
from loraplex.deploy.routing import routed_adapter
from loraplex.frontends.body_limits import BodyLease, BodyMemory
from loraplex.frontends.telemetry.telemetry import REQUEST_ID_HEADER, usable_request_id
from loraplex.serving.tenant_threads import default_executor

logger = logging.getLogger(__name__)

REPLICA: Final = "LoraplexReplica"
INGRESS: Final = "LoraplexIngress"
_ROUTER: Final = "loraplex.deploy.ray_router:AdapterRouter"
_REPORT_SECONDS: Final = 1.0
_LOST: Final = (
    ray.exceptions.RayActorError,
    ray.exceptions.NodeDiedError,
    ray.exceptions.ObjectLostError,
)
"""What Ray raises for a replica that ended; ActorDiedError and others are kinds of these."""
_HOP_HEADERS: Final = (b"connection", b"transfer-encoding")


def app(args: Mapping[str, Any]) -> "serve.Application":
    """Build the application. Raises ConfigError for arguments that are unknown or wrong."""
    deployment = read_arguments(args)
    replicas = serve.deployment(LoraplexReplica, name=REPLICA, **replica_options(deployment))
    settings = msgspec.msgpack.encode(deployment.config)
    ingress = serve.deployment(
        LoraplexIngress,
        name=INGRESS,
        num_replicas=deployment.num_ingress_replicas,
        max_ongoing_requests=deployment.config.server.max_connections,
        graceful_shutdown_timeout_s=deployment.config.server.shutdown_seconds,
    )
    return ingress.bind(settings, replicas.bind(settings))


def replica_options(deployment: Deployment) -> dict[str, Any]:
    """Return the options of the replicas' deployment: those given, and what settings imply."""
    options = dict(deployment.options)
    options.setdefault("max_ongoing_requests", deployment.max_ongoing_requests)
    # Draining ends within the time that the server itself gives its requests.
    grace = deployment.config.server.shutdown_seconds
    options.setdefault("graceful_shutdown_timeout_s", grace)
    if (scaling := options.get("autoscaling_config")) is not None:
        # A replica with more requests than slots has a queue.
        options["autoscaling_config"] = {
            "target_ongoing_requests": deployment.num_slots,
            **scaling,
        }
    if deployment.num_devices and "placement_group_bundles" not in options:
        actor = options.get("ray_actor_options", {})
        options["ray_actor_options"] = {"num_gpus": deployment.num_devices, **actor}
    options["request_router_config"] = RequestRouterConfig(
        request_router_class=_ROUTER, request_routing_stats_period_s=_REPORT_SECONDS
    )
    return options


class LoraplexReplica:
    """Deployment of `replica.Replica`."""

    async def __init__(self, settings: bytes) -> None:  # type: ignore[misc]
        """Start the server. settings: an encoded Config."""
        config = msgspec.msgpack.decode(settings, type=Config)
        set_up_logging(config.server)
        config = with_open_files(config)
        asyncio.get_running_loop().set_default_executor(default_executor())
        self._stack = contextlib.AsyncExitStack()
        self._replica = await self._stack.enter_async_context(started_replica(config))

    async def respond(self, call: bytes) -> AsyncIterator[bytes]:
        """Yield encoded messages; see Replica.respond."""
        async with contextlib.aclosing(self._replica.respond(decode_call(call))) as responding:
            async for messages in responding:
                yield encode_message(messages)

    async def record_routing_stats(self) -> dict[str, Any]:
        """Report load and resident adapters; Ray calls it."""
        return (await self._replica.report()).to_stats()

    def check_health(self) -> None:
        """Raise if the replica cannot serve any more; Ray calls it and then replaces it."""
        self._replica.check()

    async def __del__(self) -> None:
        """Drain and stop; Ray awaits it when it stops the replica."""
        if hasattr(self, "_stack"):
            await self._stack.aclose()


class LoraplexIngress:
    """Deployment that receives HTTP requests, and relays each to the replica that its router
    chooses."""

    def __init__(self, settings: bytes, replicas: DeploymentHandle) -> None:
        """settings: an encoded Config, the replicas'."""
        config = msgspec.msgpack.decode(settings, type=Config)
        self._max_body_bytes = config.server.max_body_bytes
        self._models = tuple(config.models)
        self._dialect = config.server.dialect
        self._bodies = BodyMemory.of(config.server, has_keys=False)
        self._wait_seconds = max(model.engine_restart_seconds for model in config.models.values())
        self._replicas = replicas.options(method_name="respond", stream=True)

    async def __call__(self, request: Request) -> Response:
        """Respond to a request."""
        path = called_path(request.scope)
        messages = self._relayed(request)
        try:
            start = await anext(messages)
        except LoraplexError as error:
            return refusal(path, error, self._dialect)
        assert isinstance(start, Start)
        response = StreamingResponse(self._body(path, start, messages), start.status)
        response.raw_headers = [
            (name, value) for name, value in start.headers if name not in _HOP_HEADERS
        ]
        return response

    async def _relayed(self, request: Request) -> AsyncGenerator[Start | Body, None]:
        """Yield the response. The request's body counts until its end, for another replica may
        need it."""
        with self._bodies.lease() as lease:
            call = await self._call(request, lease)
            async with contextlib.aclosing(Relay(call, self._send).messages()) as messages:
                async for message in messages:
                    yield message

    async def _call(self, request: Request, lease: BodyLease) -> HttpCall:
        body = bytearray()
        with contextlib.suppress(ClientDisconnect):
            async for piece in request.stream():
                lease.take(len(piece))
                body += piece
                if len(body) > self._max_body_bytes:
                    raise PayloadTooLargeError(
                        f"the body is larger than {self._max_body_bytes} bytes (max_body_bytes)"
                    )
        # One id at every replica: it is part of the response.
        name, given = REQUEST_ID_HEADER.encode(), request.headers.get(REQUEST_ID_HEADER)
        headers = [pair for pair in request.scope["headers"] if pair[0] != name]
        headers.append((name, usable_request_id(given or uuid.uuid4().hex).encode()))
        return HttpCall(
            method=request.method,
            path=called_path(request.scope),
            query=request.scope.get("query_string", b""),
            headers=tuple(map(tuple, headers)),
            body=bytes(body),
            client=request.client.host if request.client else "",
        )

    async def _send(self, call: HttpCall) -> AsyncGenerator[list[Message], None]:
        """Send a request to the replica that the router chooses."""
        adapter = routed_adapter(call.headers, call.body, self._models)
        replicas = (
            self._replicas.options(multiplexed_model_id=adapter) if adapter else self._replicas
        )
        responses = replicas.remote(encode_message(call))
        pieces = aiter(responses)
        try:
            # A lost replica's successor may have to start first.
            async with asyncio.timeout(self._wait_seconds if call.former else None):
                piece = await anext(pieces, None)
            while piece is not None:
                yield decode_messages(piece)
                piece = await anext(pieces, None)
        except _LOST as error:
            raise ReplicaLost(str(error)) from error
        except TimeoutError as error:
            raise EngineRestartedError(
                f"no replica took the request over in {self._wait_seconds:g} s "
                "(engine_restart_seconds)"
            ) from error
        except BackPressureError as error:
            raise QueueFullError(str(error), retry_after_seconds=1) from error
        finally:
            # The client has gone, or the response is complete: then this does nothing.
            responses.cancel()

    async def _body(
        self, path: str, start: Start, messages: AsyncGenerator[Start | Body, None]
    ) -> AsyncIterator[bytes]:
        try:
            async with contextlib.aclosing(messages):
                async for message in messages:
                    if isinstance(message, Body):
                        yield message.data
        except LoraplexError as error:
            content_type = dict(start.headers).get(b"content-type", b"")
            if not content_type.startswith(b"text/event-stream"):
                raise  # the connection breaks: the client sees that the body is not complete
            logger.warning("the stream %s ends: %s", path, error.message)
            refused = refusal(path, error)
            yield b"data: " + bytes(refused.body) + b"\n\n"
