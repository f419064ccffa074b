"""vLLM's flags that Kubernetes controllers write, for `loraplex serve`.

KServe's LLMInferenceService names a model more than once, and gives adapters as JSON texts whose
quotes no shell removes.
"""

import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeVar

import typer

from loraplex.cli.help_page import FlagPage
from loraplex.cli.settings_flags import optional_flag, with_flags
from loraplex.compat.triton.engine_args import row_of
from loraplex.core.errors import ConfigError
from loraplex.core.support import Feature, Support

_PANEL: Final = "vLLM"
SERVED_MODEL_NAME: Final = "--served-model-name"
LORA_MODULES: Final = "--lora-modules"

FLAGS: Final[tuple[Feature, ...]] = (
    Feature(SERVED_MODEL_NAME, note="names of the model; the first is as --name"),
    Feature(LORA_MODULES, note='adapters, each as NAME=PATH or {"name": NAME, "path": PATH}'),
    Feature("--port", note="as --http-port"),
    Feature("--ssl-certfile", note="as --tls-cert"),
    Feature("--ssl-keyfile", note="as --tls-key"),
    Feature("--enable-ssl-refresh", Support.NO_EFFECT, "a new certificate is always read"),
    *(
        Feature(f"--{key.replace('_', '-')}", row_of(key).support, row_of(key).reason)
        for key in ("max_loras", "max_cpu_loras")
    ),
)
_LISTS: Final = (SERVED_MODEL_NAME, LORA_MODULES)
_SWITCHES: Final = ("--enable-ssl-refresh",)
_SETTINGS: Final = {
    "--port": "http_port",
    "--ssl-certfile": "tls_cert",
    "--ssl-keyfile": "tls_key",
}
_QUOTES: Final = "'\""

Command = TypeVar("Command", bound=Callable[..., None])


class VllmFlagPage(FlagPage):
    """A command whose list flags take all values up to the next flag."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, list(_repeated(args)))


def _repeated(args: Sequence[str]) -> Iterator[str]:
    """Yield `--flag a --flag b` for `--flag a b`."""
    flag = ""
    num_values = 0
    for argument in args:
        if argument.startswith("-"):
            flag, num_values = argument, 0
        elif flag in _LISTS:
            num_values += 1
            if num_values > 1:
                yield flag
        yield argument


class GivenFlags(NamedTuple):
    """Flags of a command line, with ours in the place of vLLM's."""

    names: list[str]
    """Names of the model, the first of which is its own."""
    adapters: dict[str, dict[str, str]]
    """Table [models.X.adapters]."""
    settings: dict[str, Any]


def with_vllm_flags(command: Command) -> Command:
    """Give a command the flags of the table, after those of with_settings.

    The value of a flag that is not given is None.
    """
    return with_flags(command, map(_parameter, FLAGS))


def split_flags(flags: Mapping[str, Any]) -> GivenFlags:
    """Raises ConfigError for a wrong value, and for a flag that is given by both names."""
    given = {name: value for name, value in flags.items() if value is not None}
    theirs = {flag.name: given.pop(_variable(flag.name), None) for flag in FLAGS}
    for flag, setting in _SETTINGS.items():
        if theirs[flag] is None:
            continue
        if setting in given:
            own = setting.replace("_", "-")
            raise ConfigError(f"flags {flag} and --{own} are the same: give one of them")
        given[setting] = theirs[flag]
    names, modules = theirs[SERVED_MODEL_NAME] or [], theirs[LORA_MODULES] or []
    return GivenFlags(names, _adapters(modules), given)


def _adapters(modules: Sequence[str]) -> dict[str, dict[str, str]]:
    adapters: dict[str, dict[str, str]] = {}
    for module in modules:
        name, path = _adapter(module)
        if name in adapters:
            raise ConfigError(f"flag {LORA_MODULES} names {name!r} twice")
        adapters[name] = {"path": path}
    return adapters


def _adapter(module: str) -> tuple[str, str]:
    text = module.strip()
    if len(text) > 1 and text[0] == text[-1] and text[0] in _QUOTES:
        text = text[1:-1]
    name: Any
    path: Any
    if text.startswith("{"):
        try:
            fields = json.loads(text)
        except json.JSONDecodeError as error:
            raise ConfigError(f"flag {LORA_MODULES}: {module} is not JSON: {error}") from None
        # base_model_name, which vLLM shows as the parent, is the one model of the command.
        unknown = fields.keys() - {"name", "path", "base_model_name"}
        if unknown:
            raise ConfigError(
                f"flag {LORA_MODULES}: {module} has an unknown field {min(unknown)!r}; known are "
                "name, path and base_model_name"
            )
        name, path = fields.get("name"), fields.get("path")
    else:
        name, _, path = text.partition("=")
    if not (isinstance(name, str) and isinstance(path, str) and name and path):
        raise ConfigError(
            f'flag {LORA_MODULES} must be NAME=PATH or {{"name": NAME, "path": PATH}}, got {module}'
        )
    return name, path


def _variable(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


def _parameter(flag: Feature) -> inspect.Parameter:
    effect = "No effect: " if flag.support is Support.NO_EFFECT else ""
    words = f"{effect}{flag.note}."
    option = typer.Option(flag.name, help=words[0].upper() + words[1:], rich_help_panel=_PANEL)
    kind: Any = list[str] if flag.name in _LISTS else str
    return optional_flag(_variable(flag.name), bool if flag.name in _SWITCHES else kind, option)
