"""What is done with one thing that a client of a replaced system may send, set or read: a field, a
tensor, a parameter, a flag, a route, a metric. Tables of these are the documentation.
"""

import enum
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec


class Support(enum.StrEnum):
    """The words are those of the generated tables."""

    WORKS = "works"
    NO_EFFECT = "accepted without effect"
    REFUSED = "refused"


Handler = TypeVar("Handler", bound=Callable[..., Any])


class Feature(msgspec.Struct, frozen=True):
    """One row of a table."""

    name: str
    """As it is on the wire, on the command line or in the file."""
    support: Support = Support.WORKS
    note: str = ""
    """What it does or changes, or what to use instead; a phrase without a full stop."""
    form: str = ""
    """What values it has: a type and a shape, an HTTP method, labels."""
    other_names: tuple[str, ...] = ()
    """That mean the same."""
    is_ours: bool = False
    """No replaced system has it."""

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.other_names)


class Section(msgspec.Struct, frozen=True):
    """One table."""

    title: str
    rows: tuple[Feature, ...]
    about: str = ""
    """A paragraph before the table."""


def tells(note: str, support: Support = Support.WORKS) -> Callable[[Handler], Handler]:
    """Decorates the handler of a route or RPC with what its row says; others plainly work."""

    def told(handler: Handler) -> Handler:
        handler.__dict__["support"] = (support, note)
        return handler

    return told


def support_of(handler: Callable[..., Any]) -> tuple[Support, str]:
    """What `tells` was given."""
    found: tuple[Support, str] = getattr(handler, "support", (Support.WORKS, ""))
    return found
