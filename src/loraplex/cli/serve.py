"""`loraplex serve`: joins flags, file and environment into a Config, which app.server runs."""

import functools
import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from loraplex.cli.binding import refuse_if_open, warn_of_visible_key
from loraplex.cli.command_table import FlagPage, flags_of
from loraplex.cli.options import errors_to_exit_code, parse_adapters, with_demo
from loraplex.cli.settings_flags import environment_layers, flag_layers, with_settings
from loraplex.cli.vllm_flags import (
    LORA_MODULES,
    SERVED_MODEL_NAME,
    SHORT,
    repeated,
    split_flags,
    with_vllm_flags,
)
from loraplex.core.config import Config
from loraplex.core.config_layers import Layer, file_layer, resolve
from loraplex.core.errors import ConfigError

logger = logging.getLogger(__name__)


_COMMON: Final = frozenset(
    {
        *("model", "name", "config", "adapter", "adapter_dir", "help_all", "help"),
        *("host", "http_port", "port", "api_key", "api_keys_file", "allow_no_keys"),
        *("device", "dtype", "quantization", "tensor_parallel_size"),
        *("max_model_len", "max_num_seqs", "max_lora_rank", "memory_bytes"),
        *("chat_template", "tool_call_parser", "reasoning_parser"),
        *("log_level", "log_requests", "state_dir"),
    }
)
"""Parameters that --help shows; --help-all has all."""
_ALL: Final = "loraplex.all_flags"


class ServePage(FlagPage):
    """A command that takes flags as vLLM does."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, list(repeated(list(_hyphened(args, flags_of(ctx))))))

    def shown_parameters(self, ctx: Any) -> list[Any]:
        parameters = super().shown_parameters(ctx)
        if ctx.meta.get(_ALL):
            return parameters
        return [parameter for parameter in parameters if parameter.name in _COMMON]


def print_all_flags(context: typer.Context, is_given: bool) -> None:
    """Print --help with every flag, and end."""
    if is_given:
        context.meta[_ALL] = True
        typer.echo(context.get_help())
        raise typer.Exit


def _hyphened(args: Sequence[str], known: set[str]) -> Iterator[str]:
    """Yield the words, with `-` for `_` in the names of flags, as vLLM reads them."""
    for word in args:
        name, equals, value = word.partition("=")
        hyphened = name.replace("_", "-")
        is_flag = name.startswith("--") and hyphened in known
        yield f"{hyphened}{equals}{value}" if is_flag else word


_LORA: Final = "Adapters"


@with_vllm_flags
@with_settings(short=SHORT)
def serve(
    model: Annotated[
        str | None,
        typer.Argument(
            help="Hugging Face folder, hub id, or demo (a tiny model in the package); optional "
            "with a --config."
        ),
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
    help_all: Annotated[
        bool,
        typer.Option(
            "--help-all", help="Show every flag, and exit.", is_eager=True, callback=print_all_flags
        ),
    ] = False,
    **settings: Any,
) -> None:
    """Serve a model and its adapters over the OpenAI and the Triton (KServe) protocols."""
    del help_all
    with errors_to_exit_code():
        resolved = build_config(model, name, config, adapter or [], adapter_dir or [], settings)
        given = split_flags(settings)
        # `--help` must not wait for what a server needs.
        from loraplex.app.launch import run_server, set_up_logging  # noqa: PLC0415

        set_up_logging(resolved.server)
        for sentence in given.without_effect:
            logger.info("%s", sentence)
        if given.api_keys:
            warn_of_visible_key()
        refuse_if_open(resolved.server, given.api_keys)
        run_server(resolved, functools.partial(print, flush=True), given_keys=given.api_keys)


def build_config(
    model: str | None,
    name: str | None,
    config_path: Path | None,
    adapters: list[str],
    adapter_dirs: list[str],
    flags: dict[str, Any],
) -> Config:
    """Join the layers; flags may have vLLM's, too. Raises ConfigError."""
    given = split_flags(flags)
    file = file_layer(config_path) if config_path else Layer("no file", {})
    arguments = _arguments(model, name, given.names)
    served = list(dict.fromkeys([*file.model_names, *arguments.model_names]))
    if not served:
        resolve([file])  # a misspelt key of the file is the likelier reason
        raise ConfigError(
            "no model: give a folder, a hub id, demo (a tiny model in the package), or a --config "
            "with [models.NAME]"
        )
    return resolve(
        [
            file,
            *environment_layers(served),
            arguments,
            *_adapter_layers(adapters, adapter_dirs, given.adapters, served),
            *given.layers(served),
            *flag_layers(given.settings, served),
        ]
    )


def _arguments(model: str | None, name: str | None, served_names: list[str]) -> Layer:
    """Return the layer of the argument MODEL."""
    flag = "--name" if name is not None else SERVED_MODEL_NAME
    if model is None:
        if name is not None or served_names:
            raise ConfigError(f"{flag} is the name of the argument MODEL: give MODEL, too")
        return Layer("no argument", {})
    if name is not None and served_names:
        raise ConfigError(f"{flag} and {SERVED_MODEL_NAME} both name the model: give one of them")
    own, *others = served_names or [name or Path(os.path.abspath(model)).name or model]
    path, shipped = with_demo(model, {})
    table: dict[str, Any] = {"path": path}
    if others:
        table["served_names"] = others
    if shipped:
        table["adapters"] = {
            adapter: {"path": folder, "task_id": task_id}
            for task_id, (adapter, folder) in enumerate(shipped.items(), 1)
        }
    return Layer("argument MODEL", {"models": {own: table}})


def _adapter_layers(
    adapters: list[str],
    adapter_dirs: list[str],
    modules: dict[str, dict[str, str]],
    served: list[str],
) -> Iterator[Layer]:
    if (adapters or adapter_dirs or modules) and len(served) > 1:
        raise ConfigError(
            "--adapter, --adapter-dir and --lora-modules need exactly one model; with several, "
            "write [models.NAME.adapters] in the configuration file"
        )
    if adapters:
        table = parse_adapters(adapters)
        if twice := sorted(table.keys() & modules.keys()):
            raise ConfigError(f"--adapter and {LORA_MODULES} both name {twice[0]!r}")
        yield Layer("flag --adapter", {"models": {served[0]: {"adapters": table}}})
    if modules:
        yield Layer(f"flag {LORA_MODULES}", {"models": {served[0]: {"adapters": modules}}})
    if adapter_dirs:
        folders = {"adapter_dirs": adapter_dirs}
        yield Layer("flag --adapter-dir", {"models": {served[0]: folders}})
