"""Support of the features of replaced systems: of each field, tensor, parameter, flag, route and
metric. The tables of features are the documentation, too.
"""

import enum
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec


class Support(enum.StrEnum):
    """Kind of support; the values are the words of the generated tables."""

    WORKS = "works"
    NO_EFFECT = "accepted without effect"
    REFUSED = "refused"


Handler = TypeVar("Handler", bound=Callable[..., Any])


class Feature(msgspec.Struct, frozen=True):
    """One feature: a row of a table."""

    name: str
    """Name on the wire, on the command line or in the file."""
    support: Support = Support.WORKS
    note: str = ""
    """Effect, difference or replacement; a phrase without a full stop."""
    form: str = ""
    """Form of the values: a type and a shape, an HTTP method, labels."""
    other_names: tuple[str, ...] = ()
    """Names with the same meaning."""
    is_ours: bool = False
    """Whether no replaced system has it."""

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.other_names)


class Section(msgspec.Struct, frozen=True):
    """One table of features."""

    title: str
    rows: tuple[Feature, ...]
    about: str = ""
    """A paragraph before the table."""


def support_note(note: str, support: Support = Support.WORKS) -> Callable[[Handler], Handler]:
    """Decorate the handler of a route or RPC with its row's note; others have no note and work."""

    def decorate(handler: Handler) -> Handler:
        handler.__dict__["support"] = (support, note)
        return handler

    return decorate


def support_of(handler: Callable[..., Any]) -> tuple[Support, str]:
    """Return the arguments of `support_note`, or those of a handler that works."""
    found: tuple[Support, str] = getattr(handler, "support", (Support.WORKS, ""))
    return found
