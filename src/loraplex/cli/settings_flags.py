"""Flags of settings, made from the settings' own metadata (core.setting)."""

import inspect
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, TypeVar

import typer

from loraplex.core.config import SETTINGS
from loraplex.core.config_layers import Layer, field_layers
from loraplex.core.environment import environment_fields
from loraplex.core.setting import SettingField

Command = TypeVar("Command", bound=Callable[..., None])


def with_settings(*names: str, short: Mapping[str, str] = {}) -> Callable[[Command], Command]:
    """Give a command that takes **settings one flag for each of these settings; no names: for all
    that it does not take itself. short: further flags, by setting.

    The value of a flag that is not given is None.
    """

    def decorate(command: Command) -> Command:
        taken = inspect.signature(command).parameters
        fields = map(SETTINGS.__getitem__, names) if names else SETTINGS.values()
        flags = (f for f in fields if f.name not in taken and not f.setting.is_file_only)
        return with_flags(command, (_flag(field, short.get(field.name)) for field in flags))

    return decorate


def with_flags(command: Command, flags: Iterable[inspect.Parameter]) -> Command:
    """Put flags in the place of a command's **settings: Typer reads them from the signature."""
    signature = inspect.signature(command)
    own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    command.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[*own, *flags]
    )
    return command


def optional_flag(name: str, kind: Any, option: Any) -> inspect.Parameter:
    """Return the parameter of a flag whose value is None if it is not given."""
    annotation = Annotated[typing.Optional[kind], option]  # noqa: UP045 - kind is a value
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation
    )


def environment_layers(models: Iterable[str]) -> list[Layer]:
    """Return the layers of the LORAPLEX_* variables. Raises ConfigError."""
    return field_layers("environment variable LORAPLEX_{variable}", environment_fields(), models)


def flag_layers(flags: dict[str, Any], models: Iterable[str]) -> list[Layer]:
    """Return the layers of the flags that were given. Raises ConfigError."""
    given = {name: value for name, value in flags.items() if value is not None}
    return field_layers("flag --{flag}", given, models)


def _flag(field: SettingField, short: str | None) -> inspect.Parameter:
    names = [field.flag, *(alias.replace("_", "-") for alias in field.setting.aliases)]
    form = "--{0}/--no-{0}" if field.kind is bool else "--{0}"
    option = typer.Option(
        *(form.format(name) for name in names),
        *([short] if short else []),
        help=field.help,
        metavar="<size>" if field.is_bytes else None,
        rich_help_panel=field.setting.group,
        autocompletion=_completion(field),
    )
    return optional_flag(field.name, _kind(field), option)


def _completion(field: SettingField) -> Callable[[str], list[str]] | None:
    """Return what a shell completes a value with; None: names of files."""
    words = field.choices
    if not words:
        return None

    def complete(incomplete: str) -> list[str]:
        return [word for word in words if word.startswith(incomplete)]

    return complete


def _kind(field: SettingField) -> Any:
    """Return the type of a flag. Sizes, lists of numbers and enumerations are texts, which are
    read later, as those of the environment."""
    if field.is_list:
        return list[str] if typing.get_args(field.kind)[0] is str else str
    return field.kind if field.kind in (bool, int, float) and not field.is_bytes else str
