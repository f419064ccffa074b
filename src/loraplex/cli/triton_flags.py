"""The flags of tritonserver that `loraplex triton` takes beside our own settings.

Each is in one table: it has an effect, it has none and that is told once, or it asks for
protection that is not there and is refused.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Annotated, Any, Final, TypeVar

import typer

from loraplex.core.errors import ConfigError

_PANEL: Final = "tritonserver"
_FIXED: Final = "sizes of pools and numbers of threads are fixed"
_RECORDS: Final = "see the routes /v2/trace/setting and /v2/logging"

EFFECTS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "http_address": "Address of all services; as --host.",
        "grpc_address": "The same.",
        "metrics_address": "The same.",
        "http_max_input_size": "Largest request body; as --max-body-bytes.",
        "exit_timeout_secs": "Requests in work may end after a stop; as --shutdown-seconds.",
        "log_verbose": "Above 0: as --log-level debug.",
        "model_control_mode": "none, poll (the repository is read once) or explicit.",
    }
)
"""By flag, its help."""

NO_EFFECT: Final[Mapping[str, str]] = MappingProxyType(
    {
        **dict.fromkeys(
            ("allow_http", "allow_grpc", "allow_metrics"), "all three services always run"
        ),
        **dict.fromkeys(
            ("allow_gpu_metrics", "allow_cpu_metrics", "metrics_config", "metrics_interval_ms"),
            "metrics are what they are when they are asked for",
        ),
        **dict.fromkeys(
            ("backend_config", "backend_directory", "host_policy"), "there are no backends to load"
        ),
        **dict.fromkeys(
            (
                *("pinned_memory_pool_byte_size", "cuda_memory_pool_byte_size"),
                *("http_thread_count", "model_load_thread_count", "model_load_gpu_limit"),
                *("grpc_infer_allocation_pool_size", "buffer_manager_thread_count"),
                *("cuda_virtual_address_size", "enable_peer_access"),
                "grpc_infer_thread_count",
            ),
            _FIXED,
        ),
        **dict.fromkeys(
            ("log_info", "log_warning", "log_error", "log_format", "log_file", "trace_config"),
            _RECORDS,
        ),
        **dict.fromkeys(
            ("rate_limit", "rate_limit_resource"), "max_num_seqs says how much runs at once"
        ),
        **dict.fromkeys(
            ("cache_config", "cache_directory", "response_cache_byte_size"),
            "answers are not cached; prefixes of prompts are",
        ),
        **dict.fromkeys(
            ("http_header_forward_pattern", "grpc_header_forward_pattern"),
            "models see no headers",
        ),
        **dict.fromkeys(
            (
                *("grpc_keepalive_time", "grpc_keepalive_timeout", "grpc_max_connection_age"),
                *("grpc_keepalive_permit_without_calls", "grpc_http2_max_pings_without_data"),
                *("grpc_http2_min_recv_ping_interval_without_data", "grpc_http2_max_ping_strikes"),
                *("grpc_max_connection_age_grace", "reuse_http_port", "reuse_grpc_port"),
                "grpc_infer_response_compression_level",
            ),
            "connections are kept as gRPC and HTTP do by themselves",
        ),
        "id": "the server is called triton",
        "strict_readiness": "the server is ready when its models are",
        "exit_on_error": "a model that cannot be loaded always ends the start",
        "strict_model_config": "what a configuration leaves out is always completed",
        "model_config_name": "the file is config.pbtxt",
        "model_namespacing": "every name is there once",
        "model_load_retry_count": "an engine that dies is always started again",
        "repository_poll_secs": "the repository is read once; see --adapter-watch-seconds",
        "min_supported_compute_capability": "the device itself says what it can do",
    }
)
"""By flag, why it changes nothing."""

REFUSED: Final[Mapping[str, str]] = MappingProxyType(
    {
        **dict.fromkeys(
            ("http_restricted_api", "grpc_restricted_protocol"),
            "access is not restricted by header; put a proxy in front",
        ),
        **dict.fromkeys(
            (
                *("grpc_use_ssl", "grpc_use_ssl_mutual", "grpc_server_cert"),
                *("grpc_server_key", "grpc_root_cert"),
            ),
            "connections are not encrypted; put a proxy in front",
        ),
    }
)
"""By flag, what it asks for: to ignore it would be unsafe."""

_SWITCHES: Final = ("disable_auto_complete_config",)
"""Without a value, and without effect."""
_UNASKED: Final = ("false", "0")

Command = TypeVar("Command", bound=Callable[..., None])


def with_triton_flags(command: Command) -> Command:
    """Give a command that takes **settings each flag of the tables; None is one that is not given.

    To be applied after with_settings, whose flags stay.
    """
    signature = inspect.signature(command)
    help_of = {flag: f"No effect: {reason}." for flag, reason in NO_EFFECT.items()}
    help_of |= {flag: f"Refused: {reason}." for flag, reason in REFUSED.items()}
    flags = [_flag(flag, text, str) for flag, text in {**EFFECTS, **help_of}.items()]
    flags += [_flag(flag, "No effect: it is always completed.", bool) for flag in _SWITCHES]
    command.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[*signature.parameters.values(), *flags]
    )
    return command


def split_flags(settings: dict[str, Any]) -> tuple[dict[str, str], dict[str, Any]]:
    """(tritonserver's, ours), those that were given. Raises ConfigError for a refused one."""
    given = {flag: value for flag, value in settings.items() if value is not None}
    for flag, reason in REFUSED.items():
        if str(given.get(flag, "false")).lower() not in _UNASKED:
            raise ConfigError(f"flag --{_written(flag)}: {reason}")
    foreign = {*EFFECTS, *NO_EFFECT, *REFUSED, *_SWITCHES}
    theirs = {flag: str(value) for flag, value in given.items() if flag in foreign}
    return theirs, {flag: value for flag, value in given.items() if flag not in foreign}


def without_effect(given: Mapping[str, str]) -> Iterator[str]:
    """Of the flags that were given, a sentence about each that changes nothing."""
    for flag in given:
        if flag in NO_EFFECT:
            yield f"flag --{_written(flag)} has no effect: {NO_EFFECT[flag]}"


def as_settings(given: Mapping[str, str]) -> dict[str, Any]:
    """What flags of tritonserver say in our settings, by setting. Raises ConfigError."""
    settings: dict[str, Any] = {}
    addresses = {flag: given[flag] for flag in _ADDRESSES if flag in given}
    if len(set(addresses.values())) > 1:
        names = ", ".join(f"--{_written(flag)} {value}" for flag, value in addresses.items())
        raise ConfigError(f"all services have one address: {names} differ")
    if addresses:
        settings["host"] = next(iter(addresses.values()))
    if "http_max_input_size" in given:
        settings["max_body_bytes"] = given["http_max_input_size"]
    if "exit_timeout_secs" in given:
        settings["shutdown_seconds"] = given["exit_timeout_secs"]
    if _number(given.get("log_verbose", "0")) > 0:
        settings["log_level"] = "debug"
    return settings


_ADDRESSES: Final = ("http_address", "grpc_address", "metrics_address")


def _number(text: str) -> int:
    words = {"true": 1, "false": 0}
    try:
        return words[text.lower()] if text.lower() in words else int(text)
    except ValueError:
        raise ConfigError(f"flag --log-verbose must be a number, got {text!r}") from None


def _written(flag: str) -> str:
    return flag.replace("_", "-")


def _flag(flag: str, text: str, kind: type[Any]) -> inspect.Parameter:
    option = typer.Option(f"--{_written(flag)}", help=text, rich_help_panel=_PANEL)
    return inspect.Parameter(
        flag,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[kind | None, option],
    )
