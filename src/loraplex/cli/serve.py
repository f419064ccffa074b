"""`loraplex serve`: joins flags, file and environment into a Config, which app.server runs."""

import functools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from loraplex.cli.binding import refuse_if_open
from loraplex.cli.options import errors_to_exit_code, parse_adapters
from loraplex.cli.settings_flags import environment_layers, flag_layers, with_settings
from loraplex.core.config import Config
from loraplex.core.config_layers import Layer, file_layer, resolve
from loraplex.core.errors import ConfigError

_LORA = "Adapters"


@with_settings()
def serve(
    model: Annotated[
        str | None,
        typer.Argument(help="Hugging Face folder or hub id; optional with a --config."),
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="Name of the model in requests (default: the folder's name).")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="TOML file with [server] and [models.NAME] (default: none).")
    ] = None,
    adapter: Annotated[
        list[str] | None,
        typer.Option(
            help="Adapter as NAME=PATH[,task_id=N], where PATH is a folder or file; repeatable.",
            rich_help_panel=_LORA,
        ),
    ] = None,
    adapter_dir: Annotated[
        list[str] | None,
        typer.Option(
            help="Folder whose sub-folders are adapters, named after them; repeatable.",
            rich_help_panel=_LORA,
        ),
    ] = None,
    **settings: Any,
) -> None:
    """Serve a model and its adapters over the OpenAI and the Triton (KServe) protocols."""
    with errors_to_exit_code():
        resolved = build_config(model, name, config, adapter or [], adapter_dir or [], settings)
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
    return resolve(
        [
            file,
            *environment_layers(served),
            arguments,
            *_adapter_layers(adapters, adapter_dirs, served),
            *flag_layers(flags, served),
        ]
    )


def _arguments(model: str | None, name: str | None) -> Layer:
    """Return the layer of the argument MODEL."""
    if model is None:
        if name is not None:
            raise ConfigError("--name is the name of the argument MODEL: give MODEL, too")
        return Layer("no argument", {})
    served_name = name or Path(os.path.abspath(model)).name or model
    return Layer("argument MODEL", {"models": {served_name: {"path": model}}})


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
