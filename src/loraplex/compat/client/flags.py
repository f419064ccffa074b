"""Flags of a program as the fields of a dataclass, so that a command line is made from them."""

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

from loraplex.core.errors import ConfigError
from loraplex.core.support import Feature, Support

Say = Callable[[str], None]
"""Prints one line."""

FLAG: Final = "flag"
"""The key of a field's metadata."""

_TOLD: Final[Mapping[Support, str]] = MappingProxyType(
    {Support.WORKS: "", Support.NO_EFFECT: "No effect: ", Support.REFUSED: "Refused: "}
)


@dataclasses.dataclass(frozen=True, slots=True)
class Flag:
    """What a field's flag is called and told. A positional argument has no name."""

    names: tuple[str, ...]
    help: str
    is_positional: bool = False
    support: Support = Support.WORKS
    is_ours: bool = False

    @property
    def told(self) -> str:
        """For --help."""
        return _TOLD[self.support] + self.help


def flag(
    *names: str,
    help: str,
    default: Any = dataclasses.MISSING,
    support: Support = Support.WORKS,
    is_ours: bool = False,
) -> Any:
    """A field with these flags; without a default it must be given."""
    return _field(Flag(names, help, support=support, is_ours=is_ours), default)


def argument(*, help: str, default: Any = dataclasses.MISSING) -> Any:
    """A field that stands on the command line without a flag."""
    return _field(Flag((), help, is_positional=True), default)


def features(options: type[Any]) -> tuple[Feature, ...]:
    """A row for each flag of a program."""
    fields = dataclasses.fields(options)
    flags = [(field, field.metadata[FLAG]) for field in fields]
    return tuple(
        Feature(
            flag.names[-1] if flag.names else field.name,
            flag.support,
            flag.help.rstrip("."),
            other_names=flag.names[:-1],
            is_ours=flag.is_ours,
        )
        for field, flag in flags
    )


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
