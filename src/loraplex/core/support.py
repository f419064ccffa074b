"""What is done with one thing that a client of a replaced system may send, set or read: a field, a
tensor, a parameter, a flag, a route, a metric. Tables of these are the documentation.
"""

import enum

import msgspec


class Support(enum.StrEnum):
    """The words are those of the generated tables."""

    WORKS = "works"
    NO_EFFECT = "accepted without effect"
    REFUSED = "refused"


class Feature(msgspec.Struct, frozen=True):
    """One row of a table."""

    name: str
    """As it is on the wire, on the command line or in the file."""
    support: Support = Support.WORKS
    note: str = ""
    """What it does or changes, or what to use instead; a phrase without a full stop."""
