"""What the commands print alike: an answer for programs, bytes for people."""

import json
from typing import Any

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def print_json(answer: Any) -> None:
    """A server's answer as it is."""
    print(json.dumps(answer, indent=2, ensure_ascii=False))


def readable_bytes(num_bytes: int) -> str:
    """`1.5 GiB`."""
    size, unit = float(num_bytes), 0
    while size >= 1024 and unit < len(_UNITS) - 1:
        size, unit = size / 1024, unit + 1
    return f"{size:.4g} {_UNITS[unit]}"
