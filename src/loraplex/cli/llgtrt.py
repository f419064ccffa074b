"""`loraplex compat llgtrt`: serves a folder, its llgtrt.json5 and its adapters as llgtrt does."""

import functools
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from loraplex.cli.binding import warn_if_open, warn_of_visible_key
from loraplex.cli.options import errors_to_exit_code
from loraplex.cli.settings_flags import (
    FlagTable,
    environment_layers,
    flag_layers,
    with_settings,
)
from loraplex.compat.triton.setting_rows import Kind, here, refused, setting
from loraplex.core.config import Config, ModelConfig
from loraplex.core.config_layers import Layer, resolve
from loraplex.core.errors import ConfigError

if TYPE_CHECKING:
    from loraplex.compat.llgtrt import LlgtrtConfig

logger = logging.getLogger(__name__)

_SERVER: Final[Mapping[str, Any]] = {
    "host": "0.0.0.0",
    "http_port": 3000,
    "grpc": False,
    "metrics": False,
    "persist_adapters": False,
    "dialect": "llgtrt",
}
_COMPAT: Final[Mapping[str, Any]] = {"dialect": "llgtrt_compat", "health_needs_key": True}
_PORTS: Final = {"grpc_port": "grpc", "metrics_port": "metrics"}
"""A flag of one of these ports opens it."""
_PRINTED: Final = ("print_config", "print_complete_config", "print_chat_template")
_TEXT, _SWITCH = Kind.TEXT, Kind.BOOL
_ROWS: Final = (
    setting("host", _TEXT, reason="Address to bind (default: 0.0.0.0)"),
    setting("port", Kind.WHOLE, "http_port", "Port for all of HTTP (default: 3000)"),
    setting("tokenizer", _TEXT, reason="Folder of tokenizer files (default: the engine's)"),
    here("config", _TEXT, "Path of a llgtrt.json5; repeatable: later ones win"),
    setting("chat_template", _TEXT, reason="Jinja file (default: chat_template.j2 of the engine)"),
    setting("lora_root", _TEXT, reason="Folder whose adapters are named by their path in it"),
    here("api_key", _TEXT, "API key for all routes; safer in LORAPLEX_API_KEYS"),
    here("debug", _SWITCH, "Log level debug"),
    here("debug_llg", _SWITCH, "Log level debug"),
    here("quiet", _SWITCH, "Log level warning"),
    here(
        "llgtrt_compat", _SWITCH, "Respond exactly as llgtrt does, defects included", is_ours=True
    ),
    here("print_config", _SWITCH, "Print the configuration in effect, and exit"),
    here("print_complete_config", _SWITCH, "Print it with the tokenizer's configuration, and exit"),
    here("print_chat_template", _SWITCH, "Print the chat template, and exit"),
    refused("test_py", "no Python plugin is run"),
)
_TABLE: Final = FlagTable(
    "llgtrt",
    _ROWS,
    short={
        "host": "-H",
        "port": "-p",
        "tokenizer": "-T",
        "config": "-C",
        "debug": "-d",
        "debug_llg": "-D",
        "quiet": "-q",
    },
    kinds={
        **dict.fromkeys(("tokenizer", "chat_template", "lora_root"), Path),
        "port": int,
        "config": list[Path],
        "test_py": bool,
    },
)
FLAGS: Final = _TABLE.features
"""llgtrt's flags other than --engine."""


@with_settings()
@_TABLE.added_to
def llgtrt(
    engine: Annotated[
        Path,
        typer.Option(
            *("--engine", "-E"),
            help="Hugging Face folder, or one of `loraplex compat build`.",
            rich_help_panel="llgtrt",
        ),
    ],
    **settings: Any,
) -> None:
    """Serve a model with llgtrt's flags, llgtrt.json5 and requests, on port 3000."""
    # `--help` must not wait for what a server needs.
    from loraplex.compat.llgtrt import read_config  # noqa: PLC0415

    with errors_to_exit_code():
        theirs, ours = _TABLE.split(settings)
        if "test_py" in theirs:
            raise ConfigError("--test-py: no Python plugin is run here, so there is none to test")
        files = read_config(engine, theirs.get("config", []))
        resolved = build_config(
            engine, list(files.layers(_name(engine))), {**ours, **_as_settings(theirs)}
        )
        if theirs.keys().isdisjoint(_PRINTED):
            _serve(resolved, files, theirs.get("api_key"))
            return
        complete = None if "print_config" in theirs else theirs.get("tokenizer", engine)
        _print(files, resolved.models[_name(engine)], complete, "print_chat_template" in theirs)


def _as_settings(theirs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of llgtrt's flags. Raises ConfigError for flags that exclude others."""
    debug, quiet = not theirs.keys().isdisjoint(("debug", "debug_llg")), "quiet" in theirs
    if debug and quiet:
        raise ConfigError("--debug and --quiet: give one of them")
    values = ((row.setting, theirs.get(row.key)) for row in _ROWS if row.setting)
    return {
        **{name: str(v) if isinstance(v, Path) else v for name, v in values if v is not None},
        **({"log_level": "debug" if debug else "warning"} if debug or quiet else {}),
        **(_COMPAT if "llgtrt_compat" in theirs else {}),
    }


def build_config(engine: Path, files: list[Layer], flags: dict[str, Any]) -> Config:
    """Join the layers: llgtrt's defaults, its files, the environment, the flags.

    flags: those that were given, by setting. Raises ConfigError.
    """
    from loraplex.compat.llgtrt import check_engine, own_chat_template  # noqa: PLC0415

    check_engine(engine, Path(flags.get("tokenizer", engine)))
    name = _name(engine)
    model = {"path": str(engine)}
    template = own_chat_template(engine)
    if template is not None:
        model["chat_template"] = str(template)
    opened = {_PORTS[port]: True for port in _PORTS if port in flags}
    return resolve(
        [
            Layer("default of loraplex compat llgtrt", {"server": {**_SERVER, **opened}}),
            Layer("flag --engine", {"models": {name: model}}),
            *files,
            *environment_layers([name]),
            *flag_layers(flags, [name]),
        ]
    )


def _name(engine: Path) -> str:
    """Return the model's name for our own routes; llgtrt's requests may use any name."""
    return engine.absolute().name or "model"


def _print(
    files: "LlgtrtConfig", model: ModelConfig, tokenizer: Path | None, only_template: bool
) -> None:
    from loraplex.compat.llgtrt import chat_template, shown_config  # noqa: PLC0415

    if not only_template:
        print(shown_config(files, model, tokenizer))
        return
    text = chat_template(model, tokenizer) if tokenizer else None
    if text is None:
        raise ConfigError("this model has no chat template")
    print(text)


def _serve(config: Config, files: "LlgtrtConfig", api_key: str | None) -> None:
    from loraplex.app.launch import run_server, set_up_logging  # noqa: PLC0415

    set_up_logging(config.server)
    for sentence in files.notes():
        logger.info("%s", sentence)
    if api_key is None:
        warn_if_open(config.server, "llgtrt")
    else:
        warn_of_visible_key()
    given = () if api_key is None else (api_key,)
    run_server(
        config, functools.partial(print, flush=True), given_keys=given, process_name="llgtrt"
    )
