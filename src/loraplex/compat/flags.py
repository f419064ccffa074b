"""Command lines of the programs and tools of other systems, read by tables of flags.

One row states what a flag does here, which values it takes, and (for the client programs) which
tensor it becomes. `--flag value` and `--flag=value` are the same, as are `_` and `-` in names.
"""

import argparse
import dataclasses
import difflib
import enum
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, NoReturn

from loraplex.core.errors import ConfigError
from loraplex.core.support import Feature, Support


class FlagKind(enum.Enum):
    """Type of a flag's value: what --help shows in its place, and what an error names."""

    TEXT = ("TEXT", "a text")
    WHOLE = ("N", "a whole number")
    NUMBER = ("X", "a number")
    SWITCH = ("[enable|disable]", "enable or disable")
    """TensorRT-LLM's switches stand alone or have a word."""
    BARE = ("", "enable or disable")
    """The client programs' switches never have a value."""
    PLUGIN = ("[DTYPE|disable]", "")
    """A type or auto; alone it means float16, as in the older scripts."""
    TEXTS = ("TEXT ...", "a text")
    WHOLES = ("N ...", "a whole number")
    NUMBERS = ("X ...", "a number")

    @property
    def is_list(self) -> bool:
        return self.value[0].endswith("...")


REQUIRED: Final = object()
"""The default of a flag that must be given."""
ABSENT: Final = object()
"""The default of a flag that is not in `Flags.values` unless it is given."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FlagRow:
    """One flag."""

    name: str
    """The long name in its usual spelling, with hyphens or underscores, without those in front."""
    kind: FlagKind
    support: Support
    reason: str = ""
    """What the flag does, why it has no effect, or what to use instead."""
    aliases: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()
    """Allowed texts; empty: any."""
    is_plugin: bool = False
    """Whether an engine folder's config.json records the value among those of the plugins."""
    default: Any = ABSENT
    is_positional: bool = False
    is_ours: bool = False
    """No replaced system has the flag."""
    tensor: str = ""
    """The request tensor that carries the value, as `DTYPE` or `DTYPE NAME`; empty: none."""

    @property
    def key(self) -> str:
        """The name by which `Flags` has the value."""
        return self.name.replace("-", "_")

    @property
    def spelling(self) -> str:
        """The flag as it is written on a command line."""
        return self.key if self.is_positional else _hyphened(self.name)

    @property
    def feature(self) -> Feature:
        """The row of the generated documentation."""
        others = tuple(_hyphened(name) for name in self.aliases)
        values = self.kind.value[0].strip("[]").replace("|", " or ")
        reason = self.reason.rstrip(".")
        return Feature(self.spelling, self.support, reason, values, others, self.is_ours)


def _rows_of(support: Support) -> Callable[..., FlagRow]:
    """Return a function of name, kind, reason, other names and fields that makes a row."""

    def row(name: str, kind: FlagKind, reason: str, *aliases: str, **more: Any) -> FlagRow:
        return FlagRow(
            name=name, kind=kind, support=support, reason=reason, aliases=aliases, **more
        )

    return row


here = _rows_of(Support.WORKS)
ignored = _rows_of(Support.NO_EFFECT)
refused = _rows_of(Support.REFUSED)


PLUGIN_TYPES: Final = ("auto", "float16", "float32", "bfloat16", "int32")
_SWITCH_WORDS: Final = {
    **dict.fromkeys(("enable", "true", "1"), True),
    **dict.fromkeys(("disable", "false", "0", "none"), False),
}
_ALONE: Final = MappingProxyType({FlagKind.SWITCH: "enable", FlagKind.PLUGIN: "float16"})
_SINGLE: Final = (FlagKind.TEXT, FlagKind.WHOLE, FlagKind.NUMBER)
_MARKS: Final = {Support.WORKS: "", Support.NO_EFFECT: "No effect: ", Support.REFUSED: "Refused: "}


class UsageError(ConfigError):
    """A command line that cannot be read."""


@dataclasses.dataclass(frozen=True, slots=True)
class Flags:
    """Values of a command line by key: True and False for switches, None for a disabled plugin."""

    values: Mapping[str, Any]
    without_effect: tuple[FlagRow, ...] = ()
    rows: Sequence[FlagRow] = ()

    def __contains__(self, name: str) -> bool:
        return name in self.values

    def __getattr__(self, name: str) -> Any:
        # Only for rows with defaults: all of a client program's have one.
        try:
            return self.values[name]
        except KeyError:
            raise AttributeError(name) from None

    def get(self, name: str, default: Any = None) -> Any:
        return self.values.get(name, default)


def read_flags(
    rows: Sequence[FlagRow],
    arguments: Sequence[str],
    command: str,
    about: str = "",
    *,
    takes_any_word: bool = False,
) -> Flags:
    """Read a command line.

    Raises UsageError, a ConfigError, that names the flag, and the nearest known flag for an unknown
    one. With `takes_any_word` the word after a flag is its value even if it looks like a flag.
    """
    parser = _parser(rows, command, about)
    words = list(_plain_words(rows, arguments, takes_any_word))
    may_be_missing = any(row.is_positional and row.default is not REQUIRED for row in rows)
    # Else a word that may be missing could not follow flags.
    parse = parser.parse_known_intermixed_args if may_be_missing else parser.parse_known_args
    known, rest = parse(words)
    if rest:
        raise UsageError(f"{command} knows no {rest[0]}; {_suggestion(rest[0], rows)}")
    return check_values(
        {r.key: v for r in rows if (v := known.__dict__.get(r.key)) is not None}, rows
    )


def check_values(values: Mapping[str, Any], rows: Sequence[FlagRow], prefix: str = "--") -> Flags:
    """Check values by name, from a command line or a file, and add the defaults.

    `prefix` stands in front of a name in errors. Raises ConfigError.
    """
    by_key = {row.key: row for row in rows}
    read = {row.key: row.default for row in rows if row.default not in (ABSENT, REQUIRED)}
    for name, value in values.items():
        if name not in by_key:
            raise ConfigError(f"{prefix}{name} is not a setting; {_suggestion(name, rows)}")
        read[name] = value if value is None else _value(by_key[name], value, prefix)
    effect_less = [by_key[key] for key in values if by_key[key].support is Support.NO_EFFECT]
    return Flags(read, tuple(effect_less), rows)


def check_at_least(name: str, value: float, least: float) -> None:
    """Raise ConfigError if a value is too small."""
    if not value >= least:
        raise ConfigError(f"{name} must be at least {least}, got {value}")


def _hyphened(name: str) -> str:
    return f"--{name}" if len(name) > 2 else f"-{name}"


class _Parser(argparse.ArgumentParser):
    """Parser that raises instead of ending the process."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{self.prog}: {message}")


def _parser(rows: Sequence[FlagRow], command: str, about: str) -> argparse.ArgumentParser:
    parser = _Parser(
        prog=command,
        description=about,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for row in rows:
        text = _MARKS[row.support] + row.reason
        if row.default not in (ABSENT, REQUIRED, None, "", False, ()):
            text += f" [{row.default}]"
        options: dict[str, Any] = {"help": text.replace("%", "%%")}
        if row.is_positional:
            if row.default is not REQUIRED:
                options["nargs"] = "?"
            parser.add_argument(row.key, **options)
            continue
        options |= {"dest": row.key, "required": row.default is REQUIRED}
        if row.kind is FlagKind.BARE:
            options |= {"action": "store_true", "default": argparse.SUPPRESS}
        else:
            options["metavar"] = row.kind.value[0].split()[0]
        if row.kind.is_list:
            options |= {"action": "extend", "nargs": "+"}
        elif row.kind in _ALONE:
            options |= {"nargs": "?", "const": _ALONE[row.kind]}
        parser.add_argument(*map(_hyphened, (*row.aliases, row.name)), **options)
    return parser


def _plain_words(
    rows: Sequence[FlagRow], arguments: Sequence[str], takes_any_word: bool
) -> Iterator[str]:
    """Yield the words, flags in their known spelling and joined to a value that any word is."""
    flags = {
        _hyphened(name.replace("-", "_")): (row, _hyphened(name))
        for row in rows
        for name in (row.name, *row.aliases)
    }
    left = iter(arguments)
    for word in left:
        if word == "--":
            yield from (word, *left)
            return
        name, equals, value = word.partition("=")
        key = f"--{name[2:].replace('-', '_')}" if name.startswith("--") else name
        row, spelling = flags.get(key, (None, name))
        if row and takes_any_word and not equals and row.kind in _SINGLE:
            for given in itertools.islice(left, 1):
                equals, value = "=", given
        yield f"{spelling}{equals}{value}"


def _suggestion(word: str, rows: Sequence[FlagRow]) -> str:
    name = word.lstrip("-").partition("=")[0]
    names = [known for row in rows for known in (row.name, *row.aliases)]
    near = difflib.get_close_matches(name, names, n=3)
    return f"did you mean {' or '.join(f'--{n}' for n in near)}?" if near else "see --help"


def _value(row: FlagRow, given: Any, prefix: str) -> Any:
    name = row.spelling if prefix == "--" else f"{prefix}{row.name}"
    if row.kind.is_list:
        words = given if isinstance(given, list | tuple) else [given]
        value: Any = [_read_one(row.kind, name, word) for word in words]
    else:
        value = _read_one(row.kind, name, given)
    wrong = [v for v in (value if isinstance(value, list) else [value]) if v not in row.choices]
    if wrong and row.choices:
        raise ConfigError(f"{name} must be one of {', '.join(row.choices)}, got {wrong[0]!r}")
    if row.support is Support.REFUSED and value not in (None, False, []):
        shown = name if row.kind is FlagKind.BARE else f"{name} {given}"
        raise ConfigError(f"{shown}: {row.reason}")
    return value


def _read_one(kind: FlagKind, name: str, given: Any) -> Any:
    """Read one value. Raises UsageError."""
    if kind is FlagKind.PLUGIN:
        return _read_plugin(name, str(given).lower())
    try:
        if kind in (FlagKind.SWITCH, FlagKind.BARE):
            return _SWITCH_WORDS[str(given).lower()]
        if kind in (FlagKind.NUMBER, FlagKind.NUMBERS):
            return float(given)
        is_text = kind in (FlagKind.TEXT, FlagKind.TEXTS)
        if isinstance(given, str if is_text else int | str) and not isinstance(given, bool):
            return given if is_text else int(given)
    except (KeyError, TypeError, ValueError):
        pass
    raise UsageError(f"{name} must be {kind.value[1]}, got {given!r}")


def _read_plugin(name: str, word: str) -> str | None:
    if _SWITCH_WORDS.get(word, word in PLUGIN_TYPES):
        return "auto" if word in _SWITCH_WORDS else word
    if word in _SWITCH_WORDS:
        return None
    known = ", ".join((*PLUGIN_TYPES, "disable"))
    raise UsageError(f"{name} must be one of {known}, got {word!r}")
