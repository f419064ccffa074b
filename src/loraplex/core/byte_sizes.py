"""Numbers of bytes as people write and read them."""

import re
from decimal import Decimal
from typing import Final

_BYTES: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(?:([kmgt])(i?))?b?", re.IGNORECASE)
_POWERS: Final = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB")
_ROUNDING: Final = 100
"""Values are rounded up by at most one part of so many."""


def parse_bytes(text: str) -> int:
    """Parse `1048576`, `1MiB` or `1.5 GB`: KB is 1000 bytes and KiB 1024. Raises ValueError."""
    match = _BYTES.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a number of bytes, such as 512MiB")
    number, power, binary = match.groups(default="")
    return int(Decimal(number) * (1024 if binary else 1000) ** _POWERS[power.lower()])


def readable_bytes(num_bytes: int) -> str:
    """Return a number of bytes with a unit and four digits: `1.5 GiB`."""
    size, unit = float(num_bytes), 0
    while size >= 1024 and unit < len(_UNITS) - 1:
        size, unit = size / 1024, unit + 1
    return f"{size:.4g} {_UNITS[unit]}"


def enough_bytes(num_bytes: int) -> str:
    """Return a value of a setting that is just enough: a whole number of a unit, as `124MiB`."""
    for power in range(len(_UNITS) - 1, 0, -1):
        unit = 1024**power
        number = -(-num_bytes // unit)
        if number * unit <= num_bytes + num_bytes // _ROUNDING:
            return f"{number}{_UNITS[power]}"
    return f"{num_bytes}B"
