"""`loraplex compat llgtrt`: serves a folder, its llgtrt.json5 and its adapters as llgtrt does."""

import functools
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from loraplex.cli.binding import warn_if_open, warn_of_visible_key
from loraplex.cli.options import errors_to_exit_code
from loraplex.cli.settings_flags import environment_layers, flag_layers, with_settings
from loraplex.core.config import Config, ModelConfig
from loraplex.core.config_layers import Layer, resolve
from loraplex.core.errors import ConfigError

if TYPE_CHECKING:
    from loraplex.compat.llgtrt import LlgtrtConfig

logger = logging.getLogger(__name__)

_PANEL: Final = "llgtrt"
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


def _option(*names: str, text: str, **more: Any) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=_PANEL, **more)


@with_settings()
def llgtrt(
    engine: Annotated[
        Path,
        _option("--engine", "-E", text="Hugging Face folder, or one of `loraplex compat build`."),
    ],
    host: Annotated[
        str | None, _option("--host", "-H", text="Address to bind (default: 0.0.0.0).")
    ] = None,
    port: Annotated[
        int | None, _option("--port", "-p", text="Port for all of HTTP (default: 3000).")
    ] = None,
    tokenizer: Annotated[
        Path | None,
        _option("--tokenizer", "-T", text="Folder of tokenizer files (default: the engine's)."),
    ] = None,
    config: Annotated[
        list[Path] | None,
        _option("--config", "-C", text="Path of a llgtrt.json5; repeatable: later ones win."),
    ] = None,
    chat_template: Annotated[
        Path | None,
        _option("--chat-template", text="Jinja file (default: chat_template.j2 of the engine)."),
    ] = None,
    lora_root: Annotated[
        Path | None,
        _option("--lora-root", text="Folder whose adapters are named by their path in it."),
    ] = None,
    api_key: Annotated[
        str | None,
        _option("--api-key", text="API key for all routes; safer in LORAPLEX_API_KEYS."),
    ] = None,
    debug: Annotated[bool, _option("--debug", "-d", text="Log level debug.")] = False,
    debug_llg: Annotated[bool, _option("--debug-llg", "-D", text="Log level debug.")] = False,
    quiet: Annotated[bool, _option("--quiet", "-q", text="Log level warning.")] = False,
    compat: Annotated[
        bool,
        _option("--llgtrt-compat", text="Respond exactly as llgtrt does, defects included."),
    ] = False,
    print_config: Annotated[
        bool, _option("--print-config", text="Print the configuration in effect, and exit.")
    ] = False,
    print_complete_config: Annotated[
        bool,
        _option(
            "--print-complete-config", text="Print it with the tokenizer's configuration, and exit."
        ),
    ] = False,
    print_chat_template: Annotated[
        bool, _option("--print-chat-template", text="Print the chat template, and exit.")
    ] = False,
    test_py: Annotated[
        bool, _option("--test-py", text="Refused: no Python plugin is run.")
    ] = False,
    **settings: Any,
) -> None:
    """Serve a model with llgtrt's flags, llgtrt.json5 and requests, on port 3000."""
    # `--help` must not wait for what a server needs.
    from loraplex.compat.llgtrt import read_config  # noqa: PLC0415

    with errors_to_exit_code():
        if test_py:
            raise ConfigError("--test-py: no Python plugin is run here, so there is none to test")
        files = read_config(engine, config or [])
        own = {
            "host": host,
            "http_port": port,
            "lora_root": lora_root and str(lora_root),
            "tokenizer": tokenizer and str(tokenizer),
            "chat_template": chat_template and str(chat_template),
            "log_level": _log_level(debug=debug or debug_llg, quiet=quiet),
            **(_COMPAT if compat else {}),
        }
        given = {name: value for name, value in {**settings, **own}.items() if value is not None}
        resolved = build_config(engine, list(files.layers(_name(engine))), given)
        if print_config or print_complete_config or print_chat_template:
            complete = None if print_config else tokenizer or engine
            _print(files, resolved.models[_name(engine)], complete, print_chat_template)
            return
        _serve(resolved, files, api_key)


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


def _log_level(*, debug: bool, quiet: bool) -> str | None:
    if debug and quiet:
        raise ConfigError("--debug and --quiet: give one of them")
    return "debug" if debug else "warning" if quiet else None


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
