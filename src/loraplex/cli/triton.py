"""`loraplex compat triton`: serves and writes Triton's model repositories.

It takes tritonserver's flags in addition to our own settings. The table has the support of each
flag: it works, it has no effect, which is logged once, or it requests a protection that does not
exist here and is refused.
"""

import functools
import logging
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec
import typer

from loraplex.cli.binding import warn_if_open
from loraplex.cli.command_table import CommandGroup, GroupFlagPage
from loraplex.cli.options import errors_to_exit_code
from loraplex.cli.settings_flags import (
    FlagTable,
    environment_layers,
    flag_layers,
    flag_of,
    with_settings,
)
from loraplex.compat.triton.setting_rows import Kind, SettingRow, here, no_effect, refused, setting
from loraplex.core.config import Config
from loraplex.core.config_layers import Layer, field_layers, resolve
from loraplex.core.errors import ConfigError
from loraplex.core.log_lines import send_standard_error_to
from loraplex.core.state_places import name_of
from loraplex.core.support import Feature, Support

if TYPE_CHECKING:
    from loraplex.compat.triton.export import Export
    from loraplex.compat.triton.repository import Repository

logger = logging.getLogger(__name__)


_PANEL: Final = "tritonserver"
_CONTROL: Final = "model_control_mode"
_COMPLETED: Final = "what a configuration leaves out is always completed"
_POOLS: Final = "sizes of pools and numbers of threads are fixed"
_GRPC: Final = "connections are kept as gRPC and HTTP do by themselves"
_KEYS: Final = "access is not restricted by header, but by API keys: see --api-keys-file"


def _no_effect(note: str, *keys: str) -> Iterator[SettingRow]:
    return (no_effect(key, note) for key in keys)


def _refused(note: str, *keys: str) -> Iterator[SettingRow]:
    return (refused(key, note) for key in keys)


_ROWS: Final[tuple[SettingRow, ...]] = (
    setting("http_address", Kind.TEXT, "host", "address of all services; as --host"),
    setting("grpc_address", Kind.TEXT, "host", "the same"),
    setting("metrics_address", Kind.TEXT, "host", "the same"),
    setting(
        *("http_max_input_size", Kind.TEXT, "max_body_bytes"),
        "largest request body; as --max-body-bytes",
    ),
    setting(
        *("exit_timeout_secs", Kind.TEXT, "shutdown_seconds"),
        "shutdown grace period; as --shutdown-seconds",
    ),
    here("log_file", Kind.TEXT, "the file that the log is appended to, instead of standard error"),
    here("log_verbose", Kind.TEXT, "above 0: as --log-level debug"),
    here(_CONTROL, Kind.TEXT, "none, poll (the repository is read once) or explicit"),
    here("allow_http", Kind.TEXT, "false: the port is not opened; as --no-http"),
    here("allow_grpc", Kind.TEXT, "false: the port is not opened; as --no-grpc"),
    here("grpc_use_ssl", Kind.TEXT, "with certificate and key; for all ports"),
    here("grpc_server_cert", Kind.TEXT, "as --tls-cert; for all ports"),
    here("grpc_server_key", Kind.TEXT, "as --tls-key; for all ports"),
    here("allow_metrics", Kind.TEXT, "false: the port is not opened; as --no-metrics"),
    *_no_effect(
        "use an exporter for metrics of the machine, such as node-exporter or dcgm-exporter",
        *("allow_cpu_metrics", "allow_gpu_metrics"),
    ),
    *_no_effect(
        "metrics are computed for each request",
        "metrics_interval_ms",
    ),
    *_no_effect(
        "there are no backends to load",
        *("backend_config", "backend_directory", "host_policy", "repoagent_directory"),
    ),
    *_no_effect(
        _POOLS,
        *("pinned_memory_pool_byte_size", "cuda_memory_pool_byte_size"),
        *("http_thread_count", "model_load_thread_count", "model_load_gpu_limit"),
        *("grpc_infer_allocation_pool_size", "buffer_manager_thread_count"),
        *("cuda_virtual_address_size", "enable_peer_access"),
        *("grpc_infer_thread_count", "grpc_max_response_pool_size"),
    ),
    *_no_effect(
        "see the routes /v2/trace/setting and /v2/logging",
        *("log_info", "log_warning", "log_error"),
        *("trace_config", "trace_file", "trace_level", "trace_rate", "trace_count"),
        "trace_log_frequency",
    ),
    *_no_effect(
        "max_num_seqs limits the running sequences", *("rate_limit", "rate_limit_resource")
    ),
    *_no_effect(
        "responses are not cached; prefixes of prompts are",
        *("cache_config", "cache_directory", "response_cache_byte_size"),
    ),
    *_no_effect(
        "models see no headers",
        *("http_header_forward_pattern", "grpc_header_forward_pattern"),
    ),
    *_no_effect(
        _GRPC,
        *("grpc_keepalive_time", "grpc_keepalive_timeout", "grpc_max_connection_age"),
        "grpc_keepalive_permit_without_calls",
        "grpc_http2_max_pings_without_data",
        "grpc_http2_min_recv_ping_interval_without_data",
        *("grpc_http2_max_ping_strikes", "grpc_max_connection_age_grace"),
        *("reuse_http_port", "reuse_grpc_port", "grpc_infer_response_compression_level"),
    ),
    *_no_effect("the server is called triton", "id"),
    *_no_effect("the server is ready when its models are", "strict_readiness"),
    *_no_effect("a model that cannot be loaded always ends the start", "exit_on_error"),
    no_effect("strict_model_config", _COMPLETED),
    no_effect("disable_auto_complete_config", _COMPLETED, Kind.BOOL),
    *_no_effect("the file is config.pbtxt", "model_config_name"),
    *_no_effect("every name is there once", "model_namespacing"),
    *_no_effect("an engine that dies is always started again", "model_load_retry_count"),
    *_no_effect("the repository is read once; see --adapter-watch-seconds", "repository_poll_secs"),
    *_no_effect("the device's capability is detected", "min_supported_compute_capability"),
    *_no_effect(
        "see the flag that would open it",
        *("sagemaker_port", "sagemaker_safe_port_range", "sagemaker_thread_count"),
        *("vertex_ai_port", "vertex_ai_thread_count", "vertex_ai_default_model"),
    ),
    *_refused(
        "these routes are not served; those of Triton and OpenAI are",
        *("allow_sagemaker", "allow_vertex_ai"),
    ),
    *_refused("a client may always share memory of its own; true may stay", "allow_client_shm"),
    *_refused(_KEYS, "http_restricted_api", "grpc_restricted_protocol"),
    *_refused(
        "clients are known by API keys, not by certificates: see --api-keys-file",
        *("grpc_use_ssl_mutual", "grpc_root_cert"),
    ),
)
_TABLE: Final = FlagTable(_PANEL, _ROWS)
FLAGS: Final = _TABLE.features
"""tritonserver's flags other than OWN_FLAGS. The refused ones request protection, which it would be
unsafe to ignore."""
with_triton_flags = _TABLE.added_to
without_effect = _TABLE.without_effect

OWN_FLAGS: Final = (
    Feature("--model-repository", note="a folder of models", other_names=("--model-store",)),
    Feature("--load-model", note="with --model-control-mode explicit; * is all"),
    Feature("--http-port", note="a setting [8000]"),
    Feature("--grpc-port", note="a setting [8001]"),
    Feature("--metrics-port", note="a setting [8002]"),
    Feature("--log-format", note="a setting: default and ISO8601 are text, and json is ours"),
    Feature(
        "--metrics-config",
        note="a setting: counter_latencies, histogram_latencies, summary_latencies, "
        "summary_quantiles",
    ),
)
"""tritonserver's flags that are the command's or our settings' own."""
_FALSE: Final = ("false", "0")
_TRUE: Final = ("true", "1")
_NEUTRAL: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType({"allow_client_shm": _TRUE})
"""Accepted values of refused flags, where they are not false and 0."""


def split_flags(settings: Mapping[str, Any]) -> tuple[dict[str, str], dict[str, Any]]:
    """Return the given flags as (tritonserver's, ours). Raises ConfigError for a refused one."""
    theirs, ours = _TABLE.split(settings)
    for row in _ROWS:
        value = str(theirs.get(row.key)).lower()
        neutral = _NEUTRAL.get(row.key, _FALSE)
        if row.support is Support.REFUSED and row.key in theirs and value not in neutral:
            raise ConfigError(f"flag {flag_of(row)}: {row.reason}")
    return {key: str(value) for key, value in theirs.items()}, ours


def as_settings(given: Mapping[str, str]) -> dict[str, Any]:
    """Return the settings that flags of tritonserver set. Raises ConfigError."""
    settings: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for row in (row for row in _ROWS if row.setting and row.key in given):
        source = f"{flag_of(row)} {given[row.key]}"
        first = sources.setdefault(row.setting, source)
        if settings.setdefault(row.setting, given[row.key]) != given[row.key]:
            raise ConfigError(f"all services have one address: {first}, {source} differ")
    for port in ("http", "grpc", "metrics"):
        if (allowed := given.get(f"allow_{port}")) is not None:
            settings[port] = _read_bool(f"allow_{port}", allowed)
    settings |= _tls(given)
    if _number(given.get("log_verbose", "0")) > 0:
        settings["log_level"] = "debug"
    return settings


def _tls(given: Mapping[str, str]) -> dict[str, str]:
    """Return the TLS settings: as in Triton, only with --grpc-use-ssl. Raises ConfigError."""
    if not _read_bool("grpc_use_ssl", given.get("grpc_use_ssl", "false")):
        return {}
    files = {"tls_cert": "grpc_server_cert", "tls_key": "grpc_server_key"}
    missing = [flag for flag in files.values() if flag not in given]
    if missing:
        raise ConfigError(f"flag --grpc-use-ssl needs --{missing[0].replace('_', '-')}")
    return {setting: given[flag] for setting, flag in files.items()}


def _read_bool(flag: str, text: str) -> bool:
    if text.lower() not in (*_TRUE, *_FALSE):
        raise ConfigError(f"flag --{flag.replace('_', '-')} must be true or false, got {text!r}")
    return text.lower() in _TRUE


def _number(text: str) -> int:
    words = {"true": 1, "false": 0}
    try:
        return words[text.lower()] if text.lower() in words else int(text)
    except ValueError:
        raise ConfigError(f"flag --log-verbose must be a number, got {text!r}") from None


_SOURCE = Path("tensorrt_llm", "1", "source")
"""Place of the repository that is written for a model: below a folder that Triton takes for a
version, so that Triton ignores it."""


_ServerFlag = Annotated[
    list[str] | None,
    typer.Option(
        help="Flag for loraplex compat triton, as --server-flag=--memory=8GiB; repeatable."
    ),
]
_RequestSocket = Annotated[
    str,
    typer.Option(
        help="Unix socket of the server, for Triton's user (default: in a folder of its own)."
    ),
]
_BackendDirectory = Annotated[
    Path | None,
    typer.Option(help="Folder for the backend vllm, for repositories with backend: vllm."),
]


def export(
    folder: Annotated[
        Path | None, typer.Argument(help="Repository to write: a new folder.")
    ] = None,
    model_repository: Annotated[
        list[Path] | None,
        typer.Option(help="Repository that loraplex compat triton serves; repeatable."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="Instead: model for TensorRT-LLM's five models."),
    ] = None,
    lora_dir: Annotated[
        str | None, typer.Option(help="With --model: the option of loraplex compat triton init.")
    ] = None,
    decoupled: Annotated[
        bool, typer.Option(help="With --model: the option of loraplex compat triton init.")
    ] = False,
    backend_directory: _BackendDirectory = None,
    request_socket: _RequestSocket = "",
    join: Annotated[
        bool, typer.Option(help="Use the server that runs at --request-socket.")
    ] = False,
    execution_env: Annotated[
        str, typer.Option(help="Virtual environment for Triton's Python: EXECUTION_ENV_PATH.")
    ] = "",
    python: Annotated[
        str, typer.Option(help="Python with loraplex, which starts the server (default: this one).")
    ] = sys.executable,
    server_flag: _ServerFlag = None,
) -> None:
    """Write models for tritonserver that forward requests to loraplex."""
    from loraplex.compat.triton.export import Export, export_vllm_backend  # noqa: PLC0415 - slow import

    with errors_to_exit_code():
        if join and not request_socket:
            raise ConfigError("--join needs --request-socket: where the server listens")
        how = Export(
            socket=request_socket,
            starts_server=not join,
            python=python,
            server_flags=tuple(server_flag or ()),
            environment=execution_env,
        )
        if folder is None and backend_directory is None:
            raise ConfigError("nothing to write: give a folder, or --backend-directory")
        if folder is not None:
            sources = _sources(folder, model_repository or [], model, lora_dir, decoupled=decoupled)
            _export(folder, sources, how)
        if backend_directory is not None:
            backend = export_vllm_backend(backend_directory, how)
            print(f"wrote {backend}: give tritonserver --backend-directory {backend_directory}")


def _sources(
    folder: Path,
    repositories: list[Path],
    model: str | None,
    lora_dir: str | None,
    *,
    decoupled: bool,
) -> list[Path]:
    """Return the repositories that the server will read."""
    from loraplex.compat.triton.five_models import write_filled_models  # noqa: PLC0415 - slow import

    if bool(repositories) == (model is not None):
        raise ConfigError("give --model-repository DIR, or --model MODEL")
    if model is None:
        return repositories
    source = folder / _SOURCE
    write_filled_models(source, model, lora_dir=lora_dir, is_decoupled=decoupled)
    return [source]


def _export(folder: Path, sources: list[Path], how: "Export") -> None:
    from loraplex.compat.triton.export import export_models  # noqa: PLC0415 - slow import
    from loraplex.compat.triton.repository import read_repositories  # noqa: PLC0415 - slow import

    repository = read_repositories(sources)
    repository.notes.log()
    export_models(folder, sources, repository.declarations, how)
    names = ", ".join(declaration.name for declaration in repository.declarations)
    print(f"wrote {folder} ({names}): tritonserver --model-repository {folder}")


_ALL_MODELS = "*"
_DEFAULTS = Layer("default of loraplex compat triton", {"server": {"host": "0.0.0.0"}})

triton_app = CommandGroup(help="Serve model repositories that were written for Triton.")


@triton_app.callback(cls=GroupFlagPage, invoke_without_command=True)
@with_triton_flags
@with_settings()
def triton(
    context: typer.Context,
    model_repository: Annotated[
        list[Path] | None,
        typer.Option(
            "--model-repository",
            "--model-store",
            help="Folder of models for the TensorRT-LLM or the vLLM backend; repeatable.",
        ),
    ] = None,
    load_model: Annotated[
        list[str] | None,
        typer.Option(help="Model to load in the control mode explicit; * is all; repeatable."),
    ] = None,
    **settings: Any,
) -> None:
    """Serve model repositories that were written for Triton, on 8000, 8001 and 8002."""
    if context.invoked_subcommand is not None:
        return
    with errors_to_exit_code():
        serve_repositories(model_repository or [], load_model or [], settings)


@triton_app.command("init")
def init(
    folder: Annotated[Path, typer.Argument(help="Repository to write: a new folder.")],
    model: Annotated[
        str, typer.Option(help="Hugging Face folder, or folder written by `loraplex compat build`.")
    ],
    lora_dir: Annotated[
        str | None, typer.Option(help="Folder of adapters; names of digits are task ids.")
    ] = None,
    decoupled: Annotated[
        bool, typer.Option(help="Stream responses; requests without streaming are then refused.")
    ] = False,
) -> None:
    """Write a repository with TensorRT-LLM's five models."""
    from loraplex.compat.triton.five_models import write_filled_models  # noqa: PLC0415 - slow import

    with errors_to_exit_code():
        write_filled_models(folder, model, lora_dir=lora_dir, is_decoupled=decoupled)
        print(f"wrote {folder}: loraplex compat triton --model-repository {folder}")


triton_app.command("export")(export)


def serve_repositories(
    repositories: list[Path], load_models: list[str], settings: dict[str, Any]
) -> None:
    """Serve model repositories. Raises ConfigError.

    settings: our flags and tritonserver's, by name.
    """
    # `--help` must not wait for what a server needs.
    from loraplex.app.launch import run_server, set_up_logging  # noqa: PLC0415
    from loraplex.compat.triton.repository import Reloading, read_repositories  # noqa: PLC0415
    from loraplex.frontends.kserve.models.model_control import ControlMode, ModelControl  # noqa: PLC0415

    if not repositories:
        raise ConfigError("no model repository: give --model-repository DIR")
    theirs, ours = split_flags(settings)
    control = _control_mode(theirs.get(_CONTROL, "none"), load_models)
    is_all = control != "explicit" or _ALL_MODELS in load_models
    wanted = None if is_all else list(dict.fromkeys(load_models))
    repository = read_repositories(repositories, wanted)
    # Models come and go; the repositories stay.
    config = msgspec.structs.replace(
        build_config(repository, theirs, ours), state_name=name_of(map(str, repositories))
    )
    reloading = Reloading(
        repository, repositories, functools.partial(build_config, theirs=theirs, ours=ours)
    )
    if "log_file" in theirs:
        send_standard_error_to(Path(theirs["log_file"]))
    set_up_logging(config.server)
    _log_start(repository, theirs, config)
    run_server(
        config,
        functools.partial(print, flush=True),
        repository.declarations,
        ModelControl(
            ControlMode(control),
            loaded=repository.loaded,
            reload=reloading,
            discover=reloading.discover,
        ),
        process_name="tritonserver",
    )


def build_config(
    repository: "Repository", theirs: Mapping[str, str], ours: dict[str, Any]
) -> Config:
    """Join the layers: the repositories, the environment, the flags. Raises ConfigError."""
    names = dict.fromkeys(name for layer in repository.layers for name in layer.model_names)
    return resolve(
        [
            _DEFAULTS,
            *repository.layers,
            *environment_layers(names),
            *field_layers("flag --{flag} or tritonserver's", as_settings(theirs), names),
            *flag_layers(ours, names),
        ]
    )


def _control_mode(mode: str, load_models: list[str]) -> str:
    if mode not in ("none", "poll", "explicit"):
        raise ConfigError(f"--model-control-mode must be none, poll or explicit, got {mode!r}")
    if load_models and mode != "explicit":
        raise ConfigError(
            "Error: Use of '--load-model' requires setting '--model-control-mode=explicit' as well."
        )
    return mode


def _log_start(repository: "Repository", theirs: Mapping[str, str], config: Config) -> None:
    for sentence in without_effect(theirs):
        logger.info("%s", sentence)
    repository.notes.log()
    loaded = repository.loaded
    for declaration in repository.declarations:
        if loaded is not None and declaration.name not in loaded:
            continue
        logger.info("model %s: %s", declaration.name, declaration.kind.name)
    warn_if_open(config.server, "tritonserver")
