"""Whether traces are sent, and where to."""

import logging
from typing import Protocol

from loraplex.core.environment import TraceTarget
from loraplex.core.errors import ConfigError
from loraplex.serving.wire_request import WireRequest

logger = logging.getLogger(__name__)


class Traces(Protocol):
    """Takes requests that have ended; never waits, never raises."""

    def __call__(self, request: WireRequest) -> None: ...

    def close(self) -> None: ...


def open_traces(target: TraceTarget) -> Traces | None:
    """Open the destination; None if the packages for it are not installed.

    Raises ConfigError in that case if a setting of loraplex names it: a variable of the
    environment may be meant for other programs.
    """
    try:
        # An extra: most servers are installed without it.
        from loraplex.frontends.telemetry.otlp import OtlpTraces  # noqa: PLC0415
    except ImportError as error:
        problem = (
            f"{target.source} turns traces on, but {error.name} is not installed: pip install "
            "opentelemetry-sdk opentelemetry-exporter-otlp-proto-http"
        )
        if target.is_setting:
            raise ConfigError(problem) from error
        logger.warning("%s; the server starts without traces", problem)
        return None
    return OtlpTraces(target.url, target.service_name)
