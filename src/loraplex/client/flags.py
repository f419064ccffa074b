"""Flags of a program as the fields of a dataclass, so that a command line is made from them."""

import dataclasses
from collections.abc import Callable
from typing import Any, Final

from loraplex.core.errors import ConfigError

Say = Callable[[str], None]
"""Prints one line."""

FLAG: Final = "flag"
"""The key of a field's metadata."""


@dataclasses.dataclass(frozen=True, slots=True)
class Flag:
    """What a field's flag is called and told. A positional argument has no name."""

    names: tuple[str, ...]
    help: str
    is_positional: bool = False


def flag(*names: str, help: str, default: Any = dataclasses.MISSING) -> Any:
    """A field with these flags; without a default it must be given."""
    return _field(Flag(names, help), default)


def argument(*, help: str, default: Any = dataclasses.MISSING) -> Any:
    """A field that stands on the command line without a flag."""
    return _field(Flag((), help, is_positional=True), default)


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Raises ConfigError."""
    if value not in choices:
        raise ConfigError(f"{name} must be one of {', '.join(choices)}, got {value!r}")


def check_at_least(name: str, value: float, least: float) -> None:
    """Raises ConfigError."""
    if not value >= least:
        raise ConfigError(f"{name} must be at least {least}, got {value}")


def _field(flag: Flag, default: Any) -> Any:
    return dataclasses.field(default=default, metadata={FLAG: flag})
