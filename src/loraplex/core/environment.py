"""The environment: settings, API keys, directories, and the environment of child processes.

This is the only file that reads environment variables. OpenTelemetry's SDK, where it is in use,
reads the rest of its own variables (OTEL_*).
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path

import msgspec

from loraplex.core.engine_settings import NO_CACHE
from loraplex.core.errors import ConfigError
from loraplex.core.python_process import with_safe_path

ENVIRONMENT_PREFIX = "LORAPLEX_"
_API_KEYS = "LORAPLEX_API_KEYS"
_API_KEY = "LORAPLEX_API_KEY"
_API_KEY_FILE = "LORAPLEX_API_KEY_FILE"
_NO_SETTINGS = (_API_KEYS, _API_KEY, _API_KEY_FILE)
KEY_HINT = f"this program takes its key from {_API_KEY}, or the file of {_API_KEY_FILE}"
"""Advice for the user whose key a server refuses."""
_LOG_FORMAT = "LORAPLEX_LOG_FORMAT"
"""Variable of the setting log_format, and what carries it to our own processes."""
_OTLP_ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
_OTLP_TRACES_ENDPOINT = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
_TRACES_PATH = "/v1/traces"
_SERVICE_NAME = "loraplex"
_SERVICE_LINK = re.compile(
    r"\w+_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_\w+)?)=.*"
    r"|\w+_PORT=(tcp|udp|sctp)://.*"
)
"""Variables that Kubernetes sets in each pod for the services of the namespace. Those of a service
called loraplex have our prefix, and are no settings: LORAPLEX_SERVICE_HOST, LORAPLEX_PORT."""
_SLEEPING_THREADS = ("OMP_WAIT_POLICY", "PASSIVE")
_NO_GRPC_FORKS = ("GRPC_ENABLE_FORK_SUPPORT", "false")


def environment_fields(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the LORAPLEX_* variables by field name, without those that contain API keys."""
    variables = os.environ if environment is None else environment
    return {
        name.removeprefix(ENVIRONMENT_PREFIX).lower(): value
        for name, value in variables.items()
        if name.startswith(ENVIRONMENT_PREFIX)
        and name not in _NO_SETTINGS
        and not _is_service_link(name, value)
    }


def _is_service_link(name: str, value: str) -> bool:
    return _SERVICE_LINK.fullmatch(f"{name}={value}") is not None


def server_api_keys() -> str:
    """Return LORAPLEX_API_KEYS: keys that a server accepts in addition to those of its file."""
    return os.environ.get(_API_KEYS, "")


def client_api_key() -> str:
    """Return the key for our own clients: LORAPLEX_API_KEY, or the content of the file that
    LORAPLEX_API_KEY_FILE names; empty: none. Raises ConfigError."""
    path = os.environ.get(_API_KEY_FILE)
    if _API_KEY in os.environ or not path:
        key = os.environ.get(_API_KEY, "").strip()
    else:
        try:
            key = Path(path).expanduser().read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read {_API_KEY_FILE} {path}: {error}") from error
    return key


def client_headers(api_key: str | None = None) -> dict[str, str]:
    """Return the headers with which our own clients authenticate. Raises ConfigError.

    api_key: None takes it from the environment.
    """
    key = client_api_key() if api_key is None else api_key
    if not (key.isascii() and key.isprintable()):
        raise ConfigError("the API key for clients is not one line of printable ASCII characters")
    return {"authorization": f"Bearer {key}"} if key else {}


class TraceTarget(msgspec.Struct, frozen=True):
    """Destination of traces."""

    url: str
    source: str
    """The setting or variable that it comes from, for messages."""
    service_name: str | None
    """None: OpenTelemetry's own variables name the service."""
    is_setting: bool = False
    """Whether a setting of loraplex names it, not a variable of OpenTelemetry."""


def trace_target(
    configured: str, environment: Mapping[str, str] | None = None
) -> TraceTarget | None:
    """Return the destination of traces; None: traces are not configured.

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
        return TraceTarget(_traces_url(configured), "otlp_endpoint", service_name, is_setting=True)
    if variables.get("OTEL_TRACES_EXPORTER", "otlp") != "otlp":
        return None
    if of_traces := variables.get(_OTLP_TRACES_ENDPOINT):
        return TraceTarget(of_traces, f"variable {_OTLP_TRACES_ENDPOINT}", service_name)
    if base := variables.get(_OTLP_ENDPOINT):
        return TraceTarget(_traces_url(base), f"variable {_OTLP_ENDPOINT}", service_name)
    return None


def _traces_url(base: str) -> str:
    return base if base.endswith(_TRACES_PATH) else base.rstrip("/") + _TRACES_PATH


def visible_gpus() -> int | None:
    """Return the number of GPUs that CUDA_VISIBLE_DEVICES names; None: it is not set."""
    names = os.environ.get("CUDA_VISIBLE_DEVICES")
    return None if names is None else sum(bool(name.strip()) for name in names.split(","))


def state_directory(configured: str) -> Path:
    """Return the folder of staged adapters: as configured, or by the XDG rule."""
    if configured:
        return Path(configured).expanduser()
    base = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(base).expanduser() / "loraplex"


def weights_cache_directory(configured: str, state_dir: str) -> Path | None:
    """Return the folder of packed weights; None: they are not kept. state_dir: as configured."""
    return None if configured == NO_CACHE else _kept_directory("weights", configured, state_dir)


def kernel_check_directory(configured: str, state_dir: str) -> Path:
    """Return the folder of what checks of kernels found. state_dir: as configured."""
    return _kept_directory("kernels", configured, state_dir)


def _kept_directory(name: str, configured: str, state_dir: str) -> Path:
    """Return a folder of files that can be made again. Empty strings: it is not configured."""
    if configured:
        return Path(configured).expanduser()
    if state_dir:
        return state_directory(state_dir) / name
    return cache_directory() / name


def cache_directory() -> Path:
    """Return the folder of files that can be made again, by the XDG rule."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "loraplex"


def hub_records() -> Path:
    """Return the folder with a file for each model that loraplex downloaded from the hub."""
    return cache_directory() / "hub"


def log_format() -> str:
    """Return the format of log lines in this process: text or json."""
    return os.environ.get(_LOG_FORMAT, "text")


def set_log_format(chosen: str) -> None:
    """Set the format of this process and of those that it starts."""
    if chosen == "text":
        os.environ.pop(_LOG_FORMAT, None)
    else:
        os.environ[_LOG_FORMAT] = chosen


def has_colours(*, is_terminal: bool) -> bool:
    """Return whether output may have colours, by the convention of https://no-color.org."""
    return is_terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def child_environment() -> dict[str, str]:
    """Return the environment of our own processes, which receive their settings by message.

    The format of log lines stays in it: a process logs before its first message.
    """
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(ENVIRONMENT_PREFIX) or name == _LOG_FORMAT
    }
    environment.setdefault(*_SLEEPING_THREADS)
    return with_safe_path(environment)


def server_environment() -> dict[str, str]:
    """Return the environment of a server that we start: with its settings and API keys."""
    return with_safe_path(os.environ)


def proxy_for(scheme: str, host: str) -> str | None:
    """Return the URL of the proxy for a target, by HTTP_PROXY, HTTPS_PROXY, ALL_PROXY, NO_PROXY."""
    # It brings http and email: more than all else that a sandbox process imports.
    from urllib.request import getproxies, proxy_bypass  # noqa: PLC0415

    proxies = getproxies()
    proxy = proxies.get(scheme) or proxies.get("all")
    if not proxy or proxy_bypass(host):
        return None
    return proxy if "://" in proxy else f"http://{proxy}"


def let_threads_sleep() -> None:
    """Set OpenMP's wait policy to passive, unless the operator has set it; call this before torch
    is imported.

    OpenMP's threads spin at barriers by default. If another process is busy, a spinning thread
    keeps its partner off the processor: steps of a small model then take a hundred times longer.
    """
    os.environ.setdefault(*_SLEEPING_THREADS)


def leave_grpc_out_of_forks() -> None:
    """Turn gRPC's fork handlers off, unless the operator has set them; call this before grpc is
    imported.

    gRPC prepares for forked children that continue to use it, and logs a line where it cannot. Our
    child processes always execute another program.
    """
    os.environ.setdefault(*_NO_GRPC_FORKS)
