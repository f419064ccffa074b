"""The data types of the KServe v2 protocol."""

import dataclasses
import struct
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

LENGTH_PREFIX = struct.Struct("<I")
"""Length of an element of BYTES, before it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Datatype:
    """One row of the protocol's table of data types."""

    name: str
    config_name: str
    """Its name in a model configuration."""
    wire_dtype: np.dtype[Any] | None
    """Little-endian form of one element; None where elements have no fixed size (BYTES)."""
    code: str = ""
    """Format of one element for `struct` and numpy."""
    element: struct.Struct = LENGTH_PREFIX
    """One element, or the length before it where elements have no fixed size."""
    has_json: bool = True
    """FP16 and BF16 travel in binary only."""
    limits: tuple[float, float] = (0, 0)
    """The least and the greatest finite number."""


def _row(name: str, code: str, *, has_json: bool = True) -> Datatype:
    dtype = np.dtype(f"<{code}")
    element = struct.Struct(f"<{code}")
    return Datatype(name, f"TYPE_{name}", dtype, code, element, has_json, _limits(dtype))


def _limits(dtype: np.dtype[Any]) -> tuple[float, float]:
    if dtype.kind == "f":
        highest = float(np.finfo(dtype).max)
        return -highest, highest
    if dtype.kind == "b":
        return 0, 1
    limits = np.iinfo(dtype)
    return limits.min, limits.max


DATATYPES: Mapping[str, Datatype] = MappingProxyType(
    {
        row.name: row
        for row in (
            _row("BOOL", "?"),
            _row("UINT8", "B"),
            _row("UINT16", "H"),
            _row("UINT32", "I"),
            _row("UINT64", "Q"),
            _row("INT8", "b"),
            _row("INT16", "h"),
            _row("INT32", "i"),
            _row("INT64", "q"),
            _row("FP16", "e", has_json=False),
            _row("BF16", "H", has_json=False),
            _row("FP32", "f"),
            _row("FP64", "d"),
            Datatype("BYTES", "TYPE_STRING", None),
        )
    }
)
