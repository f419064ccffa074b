"""bfloat16 without torch: the upper half of a float32, as numpy's uint16; and files of it."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

_ALIGNMENT = 8


def to_bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """The bits of the nearest bfloat16 numbers, ties to even. No value may be NaN."""
    bits = values.view(np.uint32)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    return ((bits + np.uint32(0x7FFF) + odd) >> np.uint32(16)).astype(np.uint16)


def widen_bfloat16(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """Exact."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def write_safetensors(
    path: Path,
    shapes: Mapping[str, tuple[int, ...]],
    tensor: Callable[[str, tuple[int, ...]], NDArray[np.float32]],
) -> None:
    """Write a safetensors file of bfloat16 tensors, one after another: only one is in memory.

    tensor: gives the values of a name and shape. The format: a little-endian uint64 with the
    length of a JSON header, the header (padded with spaces), the tensors.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": (start, end)}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, shape in shapes.items():
            file.write(to_bfloat16(tensor(name, shape)).astype("<u2").tobytes())
