"""The gRPC server, on the event loop of the backend and of HTTP.

gRPC's own threads read and write the sockets, so that a slow client holds up no loop.
"""

from collections.abc import Callable
from typing import Final

import grpc
import msgspec

from loraplex.core.errors import ConfigError
from loraplex.core.server_config import ServerConfig
from loraplex.frontends.access import Authenticate, everyone_is_local
from loraplex.frontends.body_limits import BodyMemory
from loraplex.frontends.kserve.grpc.calls import Calls
from loraplex.frontends.kserve.grpc.health import health_rpcs
from loraplex.frontends.kserve.grpc.servicer import TritonServicer
from loraplex.frontends.kserve.service import TritonService
from loraplex.frontends.telemetry.telemetry import Telemetry
from loraplex.serving.response_memory import ResponseMemory

MAX_MESSAGE_BYTES: Final = 2**31 - 1
_KEEPALIVE_TIMEOUT_MS = 20_000
_SHORTEST_PING_MS = 10_000
"""Clients without calls that ping more often are disconnected."""


class GrpcLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits; see the server's settings of the same meaning."""

    max_message_bytes: int
    max_values: int
    max_metadata_bytes: int
    max_streams: int
    max_connections: int
    keepalive_seconds: float
    unread_seconds: float

    @classmethod
    def of(cls, settings: ServerConfig) -> "GrpcLimits":
        return cls(
            max_message_bytes=min(settings.max_grpc_message_bytes, MAX_MESSAGE_BYTES),
            max_values=settings.max_request_values,
            max_metadata_bytes=settings.max_header_bytes,
            max_streams=settings.max_grpc_streams,
            max_connections=settings.max_connections,
            keepalive_seconds=settings.grpc_keepalive_seconds,
            unread_seconds=settings.body_timeout_seconds,
        )

    # Source of the names: grpc/impl/channel_arg_names.h of gRPC.
    def channel_arguments(self) -> tuple[tuple[str, int], ...]:
        return (
            ("grpc.max_receive_message_length", self.max_message_bytes),
            ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
            # Between the two gRPC refuses some calls, the larger the more.
            ("grpc.max_metadata_size", self.max_metadata_bytes),
            ("grpc.absolute_max_metadata_size", self.max_metadata_bytes),
            ("grpc.max_concurrent_streams", self.max_streams),
            ("grpc.max_allowed_incoming_connections", self.max_connections),
            ("grpc.keepalive_time_ms", int(self.keepalive_seconds * 1000)),
            ("grpc.keepalive_timeout_ms", _KEEPALIVE_TIMEOUT_MS),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.min_ping_interval_without_data_ms", _SHORTEST_PING_MS),
            # A second server on the port is an error, not a silent sharing.
            ("grpc.so_reuseport", 0),
        )


NO_LIMITS: Final = GrpcLimits.of(
    ServerConfig(max_grpc_message_bytes=MAX_MESSAGE_BYTES, max_grpc_streams=2**31 - 1)
)
"""Limits for tests of other things."""


class GrpcServer:
    """Serves `service` on the loop that starts it. One start, one stop."""

    def __init__(
        self,
        service: TritonService,
        host: str,
        port: int,
        *,
        authenticate: Authenticate = everyone_is_local,
        health_is_open: bool = True,
        limits: GrpcLimits = NO_LIMITS,
        telemetry: Telemetry | None = None,
        messages: BodyMemory | None = None,
        responses: ResponseMemory | None = None,
        tls: Callable[[], tuple[bytes, bytes]] | None = None,
    ) -> None:
        """health_is_open: health checks need no key. telemetry: of the whole server; None: one
        without readers. messages, responses: their memory; None: without a limit. tls: returns
        the key and the certificates, in PEM form, for each new connection; None: plain text."""
        self._calls = Calls(
            telemetry or Telemetry(),
            authenticate,
            messages or BodyMemory(),
            limits.unread_seconds,
            responses,
            health_is_open=health_is_open,
        )
        servicer = TritonServicer(service, limits.max_values)
        for rpc in (*servicer.rpcs(), *health_rpcs(servicer.is_ready)):
            self._calls.add(rpc)
        self._limits = limits
        self._tls = tls
        self._host = host
        self._port = port
        self._server: grpc.aio.Server | None = None

    @property
    def port(self) -> int:
        """The bound port; the requested one (0 is any free one) before the start."""
        return self._port

    async def start(self) -> None:
        """Bind and serve. Raises ConfigError if the address cannot be bound."""
        server = grpc.aio.server(handlers=(self._calls,), options=self._limits.channel_arguments())
        host = f"[{self._host}]" if ":" in self._host else self._host
        try:
            self._port = self._add_port(server, f"{host}:{self._port}")
        except RuntimeError as error:
            raise ConfigError(
                f"the gRPC server cannot listen on {host}:{self._port}: {error}"
            ) from None
        await server.start()
        self._server = server

    async def stop(self, grace_seconds: float = 5.0) -> None:
        """Take no more calls, let the running ones end for so long, then cancel them."""
        if self._server is not None:
            await self._server.stop(grace_seconds)
            self._server = None

    def _add_port(self, server: grpc.aio.Server, address: str) -> int:
        if self._tls is None:
            return int(server.add_insecure_port(address))
        credentials = _credentials(self._tls)
        return int(server.add_secure_port(address, credentials))


def _credentials(pair: Callable[[], tuple[bytes, bytes]]) -> grpc.ServerCredentials:
    def configuration() -> grpc.ServerCertificateConfiguration:
        return grpc.ssl_server_certificate_configuration([pair()])

    return grpc.dynamic_ssl_server_credentials(configuration(), configuration)
