"""`loraplex serve`: flags, file and environment become a Config; app.server runs it."""

import functools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from loraplex.cli.binding import refuse_if_open
from loraplex.cli.options import errors_to_exit_code, parse_adapters
from loraplex.cli.settings_flags import with_settings
from loraplex.core.config import Config
from loraplex.core.config_layers import Layer, field_layers, file_layer, resolve
from loraplex.core.environment import environment_fields
from loraplex.core.errors import ConfigError

_LORA = "Adapters"


@with_settings
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
    **settings: Any,
) -> None:
    """Serve a model and its adapters over the OpenAI and the Triton (KServe) protocols."""
    flags = {key: value for key, value in settings.items() if value is not None}
    with errors_to_exit_code():
        resolved = build_config(model, name, config, adapter or [], adapter_dir or [], flags)
        # `--help` must not wait for what a server needs.
        from loraplex.app.launch import run_server, set_up_logging  # noqa: PLC0415

        set_up_logging(resolved.server.log_level)
        refuse_if_open(resolved.server)
        run_server(resolved, functools.partial(print, flush=True))


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
