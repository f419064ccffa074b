"""Flags of settings, made from the settings' own metadata (core.setting), and flags of another
server, made from its table."""

import inspect
import typing
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from typing import Annotated, Any, Final, TypeVar

import typer

from loraplex.compat.triton.setting_rows import Kind, SettingRow
from loraplex.core.config import SETTINGS
from loraplex.core.config_layers import Layer, field_layers
from loraplex.core.environment import environment_fields
from loraplex.core.setting import SettingField
from loraplex.core.support import Feature, Support

Command = TypeVar("Command", bound=Callable[..., None])

_EFFECTS: Final = {
    Support.WORKS: "",
    Support.NO_EFFECT: "No effect: ",
    Support.REFUSED: "Refused: ",
}


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


def flag_of(row: SettingRow) -> str:
    """Return the flag of a row, as it is written on a command line."""
    return f"--{row.key.replace('_', '-')}"


class FlagTable:
    """Flags of another server, which a command takes in addition to those of settings."""

    def __init__(
        self,
        panel: str,
        rows: Iterable[SettingRow],
        *,
        short: Mapping[str, str] = {},
        kinds: Mapping[str, Any] = {},
        has_opposites: bool = False,
    ) -> None:
        """panel: title above the flags in --help. short: further names, by key. kinds: types of
        values that are neither texts nor switches, by key. has_opposites: a switch has a `--no-`
        flag, too."""
        self.rows = tuple(rows)
        self._panel = panel
        self._short = short
        self._kinds = kinds
        self._has_opposites = has_opposites

    @property
    def features(self) -> tuple[Feature, ...]:
        """Rows of the generated documentation."""
        return tuple(map(self._feature, self.rows))

    def added_to(self, command: Command) -> Command:
        """Give a command the flags of the table, after those of with_settings.

        The value of a flag that is not given is None.
        """
        return with_flags(command, map(self._parameter, self.rows))

    def split(self, flags: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the given flags as (the table's, ours), by name."""
        given = {name: value for name, value in flags.items() if value is not None}
        return {row.key: given.pop(row.key) for row in self.rows if row.key in given}, given

    def without_effect(self, given: Container[str]) -> Iterator[str]:
        """Yield a sentence about each given flag that has no effect."""
        for row in self.rows:
            if row.support is Support.NO_EFFECT and row.key in given:
                yield f"flag {flag_of(row)} has no effect: {row.reason}"

    def _feature(self, row: SettingRow) -> Feature:
        names_setting = row.setting and not row.reason
        note = f"as --{SETTINGS[row.setting].flag}" if names_setting else row.feature.note
        short = (self._short[row.key],) if row.key in self._short else ()
        return Feature(*(flag_of(row), row.support, note), other_names=short, is_ours=row.is_ours)

    def _parameter(self, row: SettingRow) -> inspect.Parameter:
        feature = self._feature(row)
        words = f"{_EFFECTS[row.support]}{feature.note}."
        is_switch = row.kind is Kind.BOOL
        opposite = f"/--no-{feature.name[2:]}" if is_switch and self._has_opposites else ""
        option = typer.Option(
            *(f"{feature.name}{opposite}", *feature.other_names),
            help=words[0].upper() + words[1:],
            rich_help_panel=self._panel,
        )
        kind = self._kinds.get(row.key, bool if is_switch else str)
        return optional_flag(row.key, kind, option)
