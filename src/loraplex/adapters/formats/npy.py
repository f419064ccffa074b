"""Reader and writer of NumPy's .npy files, with limits and without pickle.

Format: numpy.lib.format, versions 1.0 to 3.0. NumPy has no bfloat16: files hold it as raw elements
of two bytes ("V2"), and such an array is read as bfloat16 here.
"""

import io
import math
import re
from pathlib import Path

import numpy as np
from numpy.lib import format as npy_format

from loraplex.adapters.tensor_file import RawTensor, read_bounded
from loraplex.core.errors import InvalidAdapterError

_MAGIC = b"\x93NUMPY"
_LENGTH_BYTES = {b"\x01\x00": 2, b"\x02\x00": 4, b"\x03\x00": 4}  # by version
_MAX_HEADER_BYTES = 4096
# The dictionary as all writers write it. A pattern is used since NumPy's own reader runs Python's
# parser on it.
_HEADER = re.compile(
    rb"\s*\{\s*'descr':\s*'(?P<order>[<>|=])(?P<kind>[A-Za-z]\d{1,4})',"
    rb"\s*'fortran_order':\s*(?P<fortran>True|False),"
    rb"\s*'shape':\s*\((?P<shape>(?:\d{1,18}(?:,\s?\d{1,18}){0,7},?)?)\),?\s*\}\s*"
)
_TYPES = {b"f2": "F16", b"f4": "F32", b"f8": "F64", b"V2": "BF16", b"i4": "I32", b"i8": "I64"}
_DESCRIPTIONS = {"F16": "<f2", "F32": "<f4", "BF16": "|V2", "I32": "<i4"}


def read_npy(path: Path, max_bytes: int) -> RawTensor:
    """Read the array in a file, row-major and little-endian.

    Raises InvalidAdapterError if the file is not exactly an array of plain numbers;
    AdapterTooLargeError if it is over the limit.
    """
    content = read_bounded(path, max_bytes)
    header, data_start = _header(path, content)
    if header["kind"] not in _TYPES:
        raise InvalidAdapterError(
            f"{path} holds elements of type {header['kind'].decode()}; supported: "
            f"{', '.join(_TYPES.values())} (bfloat16 as V2)"
        )
    dtype = np.dtype((header["order"] + header["kind"]).decode())
    shape = tuple(int(size) for size in header["shape"].replace(b",", b" ").split())
    needed, found = math.prod(shape) * dtype.itemsize, len(content) - data_start
    if needed != found:
        raise InvalidAdapterError(
            f"{path} is truncated or has a tail: an array of shape {list(shape)} needs {needed} "
            f"bytes after its header, it has {found}"
        )
    data = memoryview(content)[data_start:]
    is_fortran = header["fortran"] == b"True"
    if is_fortran or header["order"] == b">":
        array = np.ndarray(shape, dtype, data, order="F" if is_fortran else "C")
        data = memoryview(array.astype(dtype.newbyteorder("<"), order="C").tobytes())
    return RawTensor(_TYPES[header["kind"]], shape, data)


def encode_npy_header(tensor: RawTensor) -> bytes:
    """Return the part of a file that precedes the tensor's bytes."""
    header = io.BytesIO()
    npy_format.write_array_header_1_0(
        header,
        {"descr": _DESCRIPTIONS[tensor.dtype], "fortran_order": False, "shape": tensor.shape},
    )
    return header.getvalue()


def _header(path: Path, content: bytearray) -> tuple[re.Match[bytes], int]:
    """Return the header and the start of the data. Raises InvalidAdapterError."""
    version_end = len(_MAGIC) + 2
    length_bytes = _LENGTH_BYTES.get(bytes(content[len(_MAGIC) : version_end]))
    if not content.startswith(_MAGIC) or length_bytes is None:
        raise InvalidAdapterError(f"{path} is not a NumPy array file of version 1.0 to 3.0")
    start = version_end + length_bytes
    end = start + int.from_bytes(content[version_end:start], "little")
    is_whole = end <= min(len(content), start + _MAX_HEADER_BYTES)
    header = _HEADER.fullmatch(content[start:end]) if is_whole else None
    if header is None:
        raise InvalidAdapterError(
            f"{path} is not a plain NumPy array: its header is {bytes(content[start:end][:200])!r}"
        )
    return header, end
