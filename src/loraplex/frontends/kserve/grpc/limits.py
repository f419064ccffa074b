"""What the gRPC server takes from its clients, in the words of gRPC's core.

Source of the names: grpc/impl/channel_arg_names.h of gRPC.
"""

from typing import Final

import msgspec

from loraplex.core.server_config import ServerConfig

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
