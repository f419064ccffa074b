"""`loraplex serve`: flags, file and environment become a Config; app.server runs it."""

import functools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from loraplex.cli.options import errors_to_exit_code, parse_adapters
from loraplex.core.config import (
    Config,
    Layer,
    environment_fields,
    field_layers,
    file_layer,
    resolve,
)
from loraplex.core.errors import ConfigError

_SERVER = "Server"
_ENGINE = "Engine"
_LORA = "Adapters"


def serve(
    model: Annotated[
        str | None,
        typer.Argument(help="A Hugging Face folder or hub id; none if --config has [models.NAME]."),
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="The name clients use; by default the folder's name.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="A TOML file with [server] and [models.NAME].")
    ] = None,
    adapter: Annotated[
        list[str] | None,
        typer.Option(
            help="NAME=PATH[,task_id=N], repeatable. PATH is a folder or file of an adapter.",
            rich_help_panel=_LORA,
        ),
    ] = None,
    adapter_dir: Annotated[
        list[str] | None,
        typer.Option(
            help="Every adapter folder in it is an adapter of that name; repeatable.",
            rich_help_panel=_LORA,
        ),
    ] = None,
    lora_root: Annotated[
        str | None,
        typer.Option(
            help="Every adapter below it is called by its path in it.", rich_help_panel=_LORA
        ),
    ] = None,
    multi_lora: Annotated[
        str | None,
        typer.Option(help="A JSON file: {NAME: PATH} of adapters.", rich_help_panel=_LORA),
    ] = None,
    adapter_watch_seconds: Annotated[
        float | None,
        typer.Option(
            help="How often adapter folders are looked at; 0: at the start only [5].",
            rich_help_panel=_LORA,
        ),
    ] = None,
    allowed_adapter_roots: Annotated[
        list[str] | None,
        typer.Option(
            help="Folders that clients may load adapters from; repeatable.", rich_help_panel=_LORA
        ),
    ] = None,
    allowed_adapter_hosts: Annotated[
        list[str] | None,
        typer.Option(
            help="Hosts that clients may load adapters from: huggingface.co, s3://bucket; "
            "repeatable.",
            rich_help_panel=_LORA,
        ),
    ] = None,
    allow_private_addresses: Annotated[
        bool | None,
        typer.Option(
            "--allow-private-addresses/--no-allow-private-addresses",
            help="Adapters may come from private addresses [off].",
            rich_help_panel=_LORA,
        ),
    ] = None,
    max_adapter_bytes: Annotated[
        str | None, typer.Option(help="Largest adapter [4GiB].", rich_help_panel=_LORA)
    ] = None,
    fetched_adapters_bytes: Annotated[
        str | None,
        typer.Option(help="Kept of fetched adapters [16GiB].", rich_help_panel=_LORA),
    ] = None,
    max_lora_rank: Annotated[
        int | None,
        typer.Option(
            "--max-lora-rank",
            "--lora-cache-max-adapter-size",
            help="Largest rank served [64].",
            rich_help_panel=_LORA,
        ),
    ] = None,
    optimal_lora_rank: Annotated[
        int | None,
        typer.Option(
            "--optimal-lora-rank",
            "--lora-cache-optimal-adapter-size",
            help="The usual rank, by which memory is cut into pages [8].",
            rich_help_panel=_LORA,
        ),
    ] = None,
    lora_device_bytes: Annotated[
        str | None,
        typer.Option(help="Device adapter pool, such as 256MiB.", rich_help_panel=_LORA),
    ] = None,
    lora_device_fraction: Annotated[
        float | None,
        typer.Option(
            "--lora-device-fraction",
            "--lora-cache-gpu-memory-fraction",
            help="Device adapter pool, of what weights and KV leave; on a CPU of --memory [0.05].",
            rich_help_panel=_LORA,
        ),
    ] = None,
    lora_host_bytes: Annotated[
        str | None,
        typer.Option(
            "--lora-host-bytes",
            "--lora-cache-host-memory-bytes",
            help="Host adapter cache [1GiB].",
            rich_help_panel=_LORA,
        ),
    ] = None,
    lora_eviction_policy: Annotated[
        str | None,
        typer.Option(help="Who leaves first: lru, lfu or cost [lru].", rich_help_panel=_LORA),
    ] = None,
    lora_ttl_seconds: Annotated[
        float | None,
        typer.Option(help="Idle adapters leave memory after so long.", rich_help_panel=_LORA),
    ] = None,
    adapter_base_check: Annotated[
        str | None,
        typer.Option(
            help="An adapter of another base's name: warn or error [warn].", rich_help_panel=_LORA
        ),
    ] = None,
    host: Annotated[
        str | None, typer.Option(help="Address to bind [127.0.0.1].", rich_help_panel=_SERVER)
    ] = None,
    http_port: Annotated[
        int | None, typer.Option(help="OpenAI and KServe [8000].", rich_help_panel=_SERVER)
    ] = None,
    grpc_port: Annotated[
        int | None, typer.Option(help="KServe gRPC [8001].", rich_help_panel=_SERVER)
    ] = None,
    metrics_port: Annotated[
        int | None, typer.Option(help="Prometheus [8002].", rich_help_panel=_SERVER)
    ] = None,
    max_body_bytes: Annotated[
        str | None, typer.Option(help="Largest request body [64MiB].", rich_help_panel=_SERVER)
    ] = None,
    state_dir: Annotated[
        str | None, typer.Option(help="Where staged adapters are kept.", rich_help_panel=_SERVER)
    ] = None,
    persist_adapters: Annotated[
        bool | None,
        typer.Option(
            "--persist-adapters/--no-persist-adapters",
            help="Adapters loaded over the API are there after a restart [on].",
            rich_help_panel=_LORA,
        ),
    ] = None,
    log_level: Annotated[
        str | None,
        typer.Option(help="debug, info, warning or error [info].", rich_help_panel=_SERVER),
    ] = None,
    shutdown_seconds: Annotated[
        float | None,
        typer.Option(help="Requests in work may end after a stop [30].", rich_help_panel=_SERVER),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(help="auto, float32, float16, bfloat16 [auto].", rich_help_panel=_ENGINE),
    ] = None,
    quantization: Annotated[
        str | None,
        typer.Option(help="Weights in none, int8 or int4 [none].", rich_help_panel=_ENGINE),
    ] = None,
    weights_cache_dir: Annotated[
        str | None,
        typer.Option(
            help="Packed weights, for a fast next start; none: no cache.", rich_help_panel=_ENGINE
        ),
    ] = None,
    weights_cache_bytes: Annotated[
        str | None, typer.Option(help="Largest weights cache [64GiB].", rich_help_panel=_ENGINE)
    ] = None,
    kv_dtype: Annotated[
        str | None,
        typer.Option(
            help="Of the KV cache: auto, float32, float16, bfloat16, int8 [auto].",
            rich_help_panel=_ENGINE,
        ),
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda or cuda:N [cpu].", rich_help_panel=_ENGINE)
    ] = None,
    max_model_len: Annotated[
        int | None,
        typer.Option(help="Longest prompt and output together.", rich_help_panel=_ENGINE),
    ] = None,
    max_num_seqs: Annotated[
        int | None, typer.Option(help="Sequences in one step [64].", rich_help_panel=_ENGINE)
    ] = None,
    max_num_batched_tokens: Annotated[
        int | None, typer.Option(help="Tokens in one step [512].", rich_help_panel=_ENGINE)
    ] = None,
    kv_cache_bytes: Annotated[
        str | None, typer.Option(help="KV cache, such as 4GiB.", rich_help_panel=_ENGINE)
    ] = None,
    memory_bytes: Annotated[
        str | None,
        typer.Option(
            "--memory-bytes",
            "--memory",
            help="What the device may hold: weights, KV cache and adapters.",
            rich_help_panel=_ENGINE,
        ),
    ] = None,
    kv_cache_fraction: Annotated[
        float | None,
        typer.Option(
            "--kv-cache-fraction",
            "--kv-cache-free-gpu-mem-fraction",
            help="KV cache, of the device memory that weights leave [0.9].",
            rich_help_panel=_ENGINE,
        ),
    ] = None,
    enable_prefix_cache: Annotated[
        bool | None,
        typer.Option(
            "--prefix-cache/--no-prefix-cache",
            help="Reuse the KV of equal prompt beginnings [on].",
            rich_help_panel=_ENGINE,
        ),
    ] = None,
    max_queue_size: Annotated[
        int | None, typer.Option(help="Waiting requests; 0: any [0].", rich_help_panel=_ENGINE)
    ] = None,
    max_queue_delay_microseconds: Annotated[
        int | None,
        typer.Option(help="An idle engine waits so long for company [0].", rich_help_panel=_ENGINE),
    ] = None,
    num_threads: Annotated[
        int | None, typer.Option(help="Threads of the arithmetic.", rich_help_panel=_ENGINE)
    ] = None,
    block_size: Annotated[
        int | None, typer.Option(help="Tokens in one KV block [16].", rich_help_panel=_ENGINE)
    ] = None,
    chat_template: Annotated[
        str | None, typer.Option(help="A jinja file for chat.", rich_help_panel=_ENGINE)
    ] = None,
    revision: Annotated[
        str | None,
        typer.Option(help="Branch, tag or commit of a hub id.", rich_help_panel=_ENGINE),
    ] = None,
) -> None:
    """Serve a model and its adapters over the OpenAI and the Triton (KServe) protocols."""
    flags = {
        key: value
        for key, value in locals().items()
        if value is not None and key not in {"model", "name", "config", "adapter", "adapter_dir"}
    }
    with errors_to_exit_code():
        settings = build_config(model, name, config, adapter or [], adapter_dir or [], flags)
        # `--help` must not wait for what a server needs.
        from loraplex.app.launch import run_server  # noqa: PLC0415

        run_server(settings, functools.partial(print, flush=True))


def build_config(
    model: str | None,
    name: str | None,
    config_path: Path | None,
    adapters: list[str],
    adapter_dirs: list[str],
    flags: dict[str, Any],
) -> Config:
    """Join the layers. Raises ConfigError."""
    file = file_layer(config_path) if config_path else Layer("no file", {})
    arguments = _arguments(model, name)
    served = list(dict.fromkeys([*file.model_names, *arguments.model_names]))
    if not served:
        resolve([file])  # a misspelt key of the file is the likelier reason
        raise ConfigError("no model: give a folder or a hub id, or a --config with [models.NAME]")
    environment = field_layers(
        "environment variable LORAPLEX_{variable}", environment_fields(), served
    )
    return resolve(
        [
            file,
            *environment,
            arguments,
            *_adapter_layers(adapters, adapter_dirs, served),
            *field_layers("flag --{flag}", flags, served),
        ]
    )


def _arguments(model: str | None, name: str | None) -> Layer:
    """MODEL under its name."""
    if model is None:
        if name is not None:
            raise ConfigError("--name is the name of the argument MODEL, which is not given")
        return Layer("no argument", {})
    label = name or Path(os.path.abspath(model)).name or model
    return Layer("argument MODEL", {"models": {label: {"path": model}}})


def _adapter_layers(
    adapters: list[str], adapter_dirs: list[str], served: list[str]
) -> Iterator[Layer]:
    if (adapters or adapter_dirs) and len(served) > 1:
        raise ConfigError(
            "--adapter and --adapter-dir need exactly one model; with several, "
            "write [models.NAME.adapters] in the configuration file"
        )
    if adapters:
        table = {"adapters": parse_adapters(adapters)}
        yield Layer("flag --adapter", {"models": {served[0]: table}})
    if adapter_dirs:
        folders = {"adapter_dirs": adapter_dirs}
        yield Layer("flag --adapter-dir", {"models": {served[0]: folders}})
