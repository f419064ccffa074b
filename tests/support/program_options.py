"""Options of a client program, without a command line."""

from collections.abc import Sequence
from typing import Any

from loraplex.compat.flags import FlagRow, Flags, check_values


def program_options(rows: Sequence[FlagRow], **given: Any) -> Flags:
    """Return the options with these values and the defaults of the others."""
    return check_values(given, rows)
