"""Command lines of TensorRT-LLM's tools, read by a table: one row says what a flag does here.

`--flag value` and `--flag=value` are the same, as are `_` and `-` in names. A switch may stand
alone (as the older scripts have it) or have a word: enable or disable.
"""

import argparse
import dataclasses
import difflib
import enum
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, NoReturn

from loraplex.core.errors import ConfigError
from loraplex.core.support import Feature, Support


class FlagKind(enum.Enum):
    TEXT = "TEXT"
    WHOLE = "N"
    NUMBER = "X"
    SWITCH = "[enable|disable]"
    PLUGIN = "[DTYPE|disable]"
    """A type or auto; alone it means float16, as in the older scripts."""
    TEXTS = "TEXT ..."


class FlagSection(enum.Enum):
    """Where config.json records what was said."""

    OWN = "nowhere by itself"
    BUILD = "build_config"
    PLUGIN = "build_config.plugin_config"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FlagRow:
    """One flag."""

    name: str
    """With underscores, without the hyphens before it."""
    kind: FlagKind
    support: Support
    reason: str = ""
    """What it does; why it has no effect; what to do instead."""
    aliases: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()
    """Of TEXT and TEXTS; empty: any."""
    neutral: tuple[str, ...] = ()
    """Of a refused one: the values that ask for nothing, as text."""
    section: FlagSection = FlagSection.BUILD

    @property
    def spelling(self) -> str:
        return f"--{self.name}"

    @property
    def feature(self) -> Feature:
        others = tuple(written(name) for name in self.aliases)
        values = self.kind.value.strip("[]").replace("|", " or ")
        return Feature(self.spelling, self.support, self.reason, values, others)


def written(name: str) -> str:
    """With its hyphens."""
    return f"--{name}" if len(name) > 2 else f"-{name}"


def here(name: str, kind: FlagKind, reason: str, *aliases: str, **more: Any) -> FlagRow:
    """A row of a flag that works."""
    return FlagRow(
        name=name, kind=kind, support=Support.WORKS, reason=reason, aliases=aliases, **more
    )


def ignored(name: str, kind: FlagKind, reason: str, *aliases: str, **more: Any) -> FlagRow:
    """A row of a flag that is accepted without effect."""
    return FlagRow(
        name=name, kind=kind, support=Support.NO_EFFECT, reason=reason, aliases=aliases, **more
    )


def refused(name: str, kind: FlagKind, reason: str, *aliases: str, **more: Any) -> FlagRow:
    """A row of a flag that is an error."""
    return FlagRow(
        name=name, kind=kind, support=Support.REFUSED, reason=reason, aliases=aliases, **more
    )


PLUGIN_TYPES: Final = ("auto", "float16", "float32", "bfloat16", "int32")
_ON = ("enable", "true", "1")
_OFF = ("disable", "false", "0", "none")
_ALONE: Mapping[FlagKind, Any] = MappingProxyType(
    {FlagKind.SWITCH: "enable", FlagKind.PLUGIN: "float16"}
)


@dataclasses.dataclass(frozen=True, slots=True)
class Flags:
    """What a command line said, by name; True and False for switches, None for a plugin that is
    off."""

    values: Mapping[str, Any]
    without_effect: tuple[FlagRow, ...] = ()

    def __contains__(self, name: str) -> bool:
        return name in self.values

    def get(self, name: str, default: Any = None) -> Any:
        return self.values.get(name, default)


def read_flags(
    rows: Sequence[FlagRow], arguments: Sequence[str], command: str, about: str = ""
) -> Flags:
    """Raises ConfigError that names the flag, and the nearest known one for an unknown one."""
    parser = _parser(rows, command, about)
    known, rest = parser.parse_known_args([_with_underscores(word) for word in arguments])
    if rest:
        raise ConfigError(f"{command} knows no {rest[0]}; {_meant(rest[0], rows)}")
    said = {row: getattr(known, row.name) for row in rows if hasattr(known, row.name)}
    return check_values({row.name: value for row, value in said.items()}, rows, "--")


def check_values(values: Mapping[str, Any], rows: Sequence[FlagRow], prefix: str) -> Flags:
    """Values by name, from a command line or a file. Raises ConfigError.

    prefix: what stands before a name in errors.
    """
    by_name = {row.name: row for row in rows}
    read = {}
    for name, value in values.items():
        if name not in by_name:
            raise ConfigError(f"{prefix}{name} is no setting; {_meant(name, rows)}")
        read[name] = _value(by_name[name], value, prefix)
    effect_less = [by_name[name] for name in read if by_name[name].support is Support.NO_EFFECT]
    return Flags(read, tuple(effect_less))


class _Parser(argparse.ArgumentParser):
    """One that raises instead of ending the process."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{self.prog}: {message}")


def _parser(rows: Sequence[FlagRow], command: str, about: str) -> argparse.ArgumentParser:
    parser = _Parser(
        prog=command,
        description=about,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for row in rows:
        names = [written(name) for name in (row.name, *row.aliases)]
        text = row.reason if row.support is Support.WORKS else f"({row.support}) {row.reason}"
        options: dict[str, Any] = {"dest": row.name, "help": text.replace("%", "%%")}
        options["metavar"] = row.kind.value.split()[0]
        if row.kind is FlagKind.TEXTS:
            options["nargs"] = "+"
        elif row.kind in _ALONE:
            options |= {"nargs": "?", "const": _ALONE[row.kind]}
        parser.add_argument(*names, **options)
    return parser


def _with_underscores(word: str) -> str:
    """The name of a flag, not its value."""
    if not word.startswith("--"):
        return word
    name, equals, value = word[2:].partition("=")
    return f"--{name.replace('-', '_')}{equals}{value}"


def _meant(word: str, rows: Sequence[FlagRow]) -> str:
    name = word.lstrip("-").partition("=")[0]
    names = [known for row in rows for known in (row.name, *row.aliases)]
    near = difflib.get_close_matches(name, names, n=3)
    return f"meant is perhaps {' or '.join(f'--{n}' for n in near)}" if near else "see --help"


def _value(row: FlagRow, said: Any, prefix: str) -> Any:
    """Raises ConfigError."""
    name = f"{prefix}{row.name}"
    value = _READERS[row.kind](name, said)
    wrong = [one for one in _listed(value) if row.choices and one not in row.choices]
    if wrong:
        raise ConfigError(f"{name} must be one of {', '.join(row.choices)}, got {wrong[0]!r}")
    asks_for_nothing = value in (None, False, []) or str(value) in row.neutral
    if row.support is Support.REFUSED and not asks_for_nothing:
        raise ConfigError(f"{name} {said}: {row.reason}")
    return value


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _read_text(name: str, said: Any) -> str:
    if not isinstance(said, str):
        raise ConfigError(f"{name} must be a text, got {said!r}")
    return said


def _read_whole(name: str, said: Any) -> int:
    if isinstance(said, bool) or not isinstance(said, int | str):
        raise ConfigError(f"{name} must be a whole number, got {said!r}")
    try:
        return int(said)
    except ValueError:
        raise ConfigError(f"{name} must be a whole number, got {said!r}") from None


def _read_number(name: str, said: Any) -> float:
    try:
        return float(said)
    except (TypeError, ValueError):
        raise ConfigError(f"{name} must be a number, got {said!r}") from None


def _read_switch(name: str, said: Any) -> bool:
    word = str(said).lower()
    if word not in (*_ON, *_OFF):
        raise ConfigError(f"{name} must be enable or disable, got {said!r}")
    return word in _ON


def _read_plugin(name: str, said: Any) -> str | None:
    word = str(said).lower()
    if word in _OFF:
        return None
    if word in _ON:
        return "auto"
    if word not in PLUGIN_TYPES:
        known = ", ".join((*PLUGIN_TYPES, "disable"))
        raise ConfigError(f"{name} must be one of {known}, got {said!r}")
    return word


def _read_texts(name: str, said: Any) -> list[str]:
    """A word may hold several, as some scripts quote them."""
    words = said if isinstance(said, list) else [said]
    return [_read_text(name, word) for word in words]


_READERS: Final[Mapping[FlagKind, Any]] = MappingProxyType(
    {
        FlagKind.TEXT: _read_text,
        FlagKind.WHOLE: _read_whole,
        FlagKind.NUMBER: _read_number,
        FlagKind.SWITCH: _read_switch,
        FlagKind.PLUGIN: _read_plugin,
        FlagKind.TEXTS: _read_texts,
    }
)
