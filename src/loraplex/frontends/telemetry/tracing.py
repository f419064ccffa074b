"""Whether traces are sent, and where to."""

from typing import Protocol

from loraplex.core.environment import TraceTarget
from loraplex.core.errors import ConfigError
from loraplex.serving.wire_request import WireRequest


class Traces(Protocol):
    """Takes requests that have ended; never waits, never raises."""

    def __call__(self, request: WireRequest) -> None: ...

    def close(self) -> None: ...


def open_traces(target: TraceTarget) -> Traces:
    """Raises ConfigError if the packages for it are not installed."""
    try:
        # An extra: most servers are installed without it.
        from loraplex.frontends.telemetry.otlp import OtlpTraces  # noqa: PLC0415
    except ImportError as error:
        raise ConfigError(
            f"{target.source} turns traces on, but {error.name} is not installed: "
            "pip install 'loraplex[tracing]'"
        ) from error
    return OtlpTraces(target.url, target.service_name)
