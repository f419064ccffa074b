"""`loraplex compat triton`: serves Triton's model repositories, as tritonserver does."""

import functools
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from loraplex.cli.binding import warn_if_open
from loraplex.cli.help_page import FlagPage, GroupFlagPage
from loraplex.cli.options import errors_to_exit_code
from loraplex.cli.settings_flags import environment_layers, flag_layers, with_settings
from loraplex.cli.triton_export import export
from loraplex.cli.triton_flags import as_settings, split_flags, with_triton_flags, without_effect
from loraplex.core.config import Config
from loraplex.core.config_layers import Layer, field_layers, resolve
from loraplex.core.errors import ConfigError
from loraplex.core.log_lines import send_standard_error_to
from loraplex.core.state_places import name_of

if TYPE_CHECKING:
    from loraplex.compat.triton.repository import Repository

logger = logging.getLogger(__name__)

_ALL_MODELS = "*"
_CONTROL = "model_control_mode"
_DEFAULTS = Layer("default of loraplex compat triton", {"server": {"host": "0.0.0.0"}})

triton_app = typer.Typer(
    help="Serve model repositories that were written for Triton.", rich_markup_mode="markdown"
)


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


triton_app.command("export", cls=FlagPage)(export)


def serve_repositories(
    repositories: list[Path], load_models: list[str], settings: dict[str, Any]
) -> None:
    """Serve model repositories. Raises ConfigError.

    settings: our flags and tritonserver's, by name.
    """
    # `--help` must not wait for what a server needs.
    from loraplex.app.launch import run_server, set_up_logging  # noqa: PLC0415
    from loraplex.compat.triton.reloading import Reloading  # noqa: PLC0415
    from loraplex.compat.triton.repository import read_repositories  # noqa: PLC0415
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
