"""What the environment says: settings, directories, and what our own processes are to see of it.

This is the only file that reads the environment. OpenTelemetry's SDK, where it is in use, reads the
rest of its own variables (OTEL_*).
"""

import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

from loraplex.core.engine_settings import NO_CACHE
from loraplex.core.errors import ConfigError

ENVIRONMENT_PREFIX = "LORAPLEX_"
_API_KEYS = "LORAPLEX_API_KEYS"
_API_KEY = "LORAPLEX_API_KEY"
_API_KEY_FILE = "LORAPLEX_API_KEY_FILE"
_NO_SETTINGS = (_API_KEYS, _API_KEY, _API_KEY_FILE)
WHERE_KEYS_ARE = f"this program takes its key from {_API_KEY}, or the file of {_API_KEY_FILE}"
"""What people are told whose key a server refuses."""
_OTLP_ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
_OTLP_TRACES_ENDPOINT = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
_TRACES_PATH = "/v1/traces"
_SERVICE_NAME = "loraplex"
_SLEEPING_THREADS = ("OMP_WAIT_POLICY", "PASSIVE")
_NO_GRPC_FORKS = ("GRPC_ENABLE_FORK_SUPPORT", "false")


def environment_fields(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """The LORAPLEX_* variables by field name; those that hold keys are no settings."""
    variables = os.environ if environment is None else environment
    return {
        name.removeprefix(ENVIRONMENT_PREFIX).lower(): value
        for name, value in variables.items()
        if name.startswith(ENVIRONMENT_PREFIX) and name not in _NO_SETTINGS
    }


def server_api_keys() -> str:
    """LORAPLEX_API_KEYS: the keys that a server takes beside those of its file; empty: none."""
    return os.environ.get(_API_KEYS, "")


def client_api_key() -> str:
    """What our own clients show to a server: LORAPLEX_API_KEY, or what stands in the file that
    LORAPLEX_API_KEY_FILE names; empty: nothing. Raises ConfigError."""
    path = os.environ.get(_API_KEY_FILE)
    if _API_KEY in os.environ or not path:
        key = os.environ.get(_API_KEY, "").strip()
    else:
        try:
            key = Path(path).expanduser().read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read {_API_KEY_FILE} {path}: {error}") from error
    if not (key.isascii() and key.isprintable()):
        raise ConfigError("the API key for clients is not one line of printable ASCII characters")
    return key


def client_headers() -> dict[str, str]:
    """What our own clients send to say who they are. Raises ConfigError."""
    key = client_api_key()
    return {"authorization": f"Bearer {key}"} if key else {}


class TraceTarget(msgspec.Struct, frozen=True):
    """Where traces go."""

    url: str
    source: str
    """What asked for it, for messages."""
    service_name: str | None
    """None: OpenTelemetry's own variables name the service."""


def trace_target(
    configured: str, environment: Mapping[str, str] | None = None
) -> TraceTarget | None:
    """Where traces are to go; None: nowhere, as long as nobody asked for them.

    configured: the setting otlp_endpoint, which wins over OpenTelemetry's variables. Like
    OTEL_EXPORTER_OTLP_ENDPOINT it is the collector's base address. Source: OpenTelemetry's
    specification of environment variables and of the OTLP exporter.
    """
    variables = os.environ if environment is None else environment
    if variables.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    is_named = "OTEL_SERVICE_NAME" in variables or "service.name=" in variables.get(
        "OTEL_RESOURCE_ATTRIBUTES", ""
    )
    service_name = None if is_named else _SERVICE_NAME
    if configured:
        return TraceTarget(_traces_url(configured), "otlp_endpoint", service_name)
    if variables.get("OTEL_TRACES_EXPORTER", "otlp") != "otlp":
        return None
    if of_traces := variables.get(_OTLP_TRACES_ENDPOINT):
        return TraceTarget(of_traces, f"variable {_OTLP_TRACES_ENDPOINT}", service_name)
    if base := variables.get(_OTLP_ENDPOINT):
        return TraceTarget(_traces_url(base), f"variable {_OTLP_ENDPOINT}", service_name)
    return None


def _traces_url(base: str) -> str:
    return base if base.endswith(_TRACES_PATH) else base.rstrip("/") + _TRACES_PATH


def state_directory(configured: str) -> Path:
    """Where staged adapters live: as configured, or by the XDG rule."""
    if configured:
        return Path(configured).expanduser()
    base = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(base).expanduser() / "loraplex"


def weights_cache_directory(configured: str, state_dir: str) -> Path | None:
    """Where packed weights live; None: nowhere. state_dir: as configured."""
    if configured == NO_CACHE:
        return None
    if configured:
        return Path(configured).expanduser()
    if state_dir:
        return state_directory(state_dir) / "weights"
    return cache_directory() / "weights"


def cache_directory() -> Path:
    """What can be made again lives here, by the XDG rule."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "loraplex"


def child_environment() -> dict[str, str]:
    """The environment for our own processes: settings reach them by message, not by variable."""
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(ENVIRONMENT_PREFIX)
    }
    environment.setdefault(*_SLEEPING_THREADS)
    return environment


def let_threads_sleep() -> None:
    """For this process, unless the operator decided otherwise: call it before torch is imported.

    OpenMP's threads spin at barriers by default. Beside any other busy process a spinning thread
    keeps its partner off the processor: steps of a small model then take a hundred times longer.
    """
    os.environ.setdefault(*_SLEEPING_THREADS)


def leave_grpc_out_of_forks() -> None:
    """For this process, unless the operator decided otherwise: call it before grpc is imported.

    gRPC prepares for children that go on with its own code, and writes a line where it cannot.
    Whatever serving starts is another program at once.
    """
    os.environ.setdefault(*_NO_GRPC_FORKS)
