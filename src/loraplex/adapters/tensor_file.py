"""Safetensors files, read with limits and written in one fixed order.

A file is an 8-byte little-endian length, a JSON header of that length, and the tensors' bytes.
Format: https://huggingface.co/docs/safetensors. Files are read, never mapped: one that shrinks
under us is an error, not a signal. The meaning of the tensors is not known here.
"""

import contextlib
import dataclasses
import io
import json
import math
import os
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, BinaryIO

import msgspec
import numpy as np
import numpy.typing as npt

from loraplex.core.byte_sizes import readable_bytes
from loraplex.core.errors import AdapterTooLargeError, InvalidAdapterError
from loraplex.core.rank_limits import RankLimits

_LENGTH_BYTES = 8
_LFS_POINTER = b"version https://git-lfs"
"""Begin of the small file that stands for a large one in a clone without Git LFS."""
_METADATA = "__metadata__"
_MAX_AXES = 32
"""Limit of NumPy, too. The product of very many sizes would take long."""
_PROBE_BYTES = 64
"""Bytes that are compared before all."""

FLOAT_TYPES = ("F64", "F32", "F16", "BF16")
_ARRAY_TYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2"}  # numpy has no bfloat16
_BITS_TYPES = {8: "<u8", 4: "<u4", 2: "<u2"}
_TYPES_BY_BYTES = {
    8: ("F64", "I64", "U64"),
    4: ("F32", "I32", "U32"),
    2: ("F16", "BF16", "I16", "U16"),
    1: ("F8_E4M3", "F8_E5M2", "BOOL", "I8", "U8"),
}
_ITEM_BYTES = {dtype: size for size, dtypes in _TYPES_BY_BYTES.items() for dtype in dtypes}


class StagingLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits that are checked before anything is read."""

    max_ranks: RankLimits = RankLimits(64)
    max_file_bytes: int = 4 << 30
    max_header_bytes: int = 16 << 20
    """Maximum header of a safetensors file, and maximum size of adapter_config.json."""
    max_tensors: int = 100_000


class TensorHeader(msgspec.Struct, frozen=True):
    """Description of a tensor whose bytes follow separately."""

    dtype: str
    """Name of its type: Triton's (FP16, BF16, FP32, INT32), NumPy's or safetensors'."""
    shape: tuple[int, ...]
    num_bytes: int


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class RawTensor:
    """Unconverted tensor: safetensors' name of its type, and its bytes, row-major."""

    dtype: str
    shape: tuple[int, ...]
    data: memoryview | bytes | bytearray

    @property
    def num_bytes(self) -> int:
        return len(self.data)

    @property
    def num_values(self) -> int:
        return math.prod(self.shape)

    @property
    def is_float(self) -> bool:
        """Whether a weight may have its type."""
        return self.dtype in FLOAT_TYPES

    @property
    def item_bytes(self) -> int:
        return _ITEM_BYTES[self.dtype]

    def bits(self) -> npt.NDArray[np.unsignedinteger]:
        """Return the bit patterns of the elements of a float tensor."""
        return np.ndarray(self.shape, _BITS_TYPES[self.item_bytes], self.data)

    def array(self) -> npt.NDArray[np.floating]:
        """Return the elements of a float tensor: a view, except for bfloat16."""
        if self.dtype == "BF16":
            return (self.bits().astype(np.uint32) << np.uint32(16)).view(np.float32)
        return np.ndarray(self.shape, _ARRAY_TYPES[self.dtype], self.data)

    def integers(self) -> npt.NDArray[np.int64]:
        """Return the elements of an I64 tensor."""
        assert self.dtype == "I64", self.dtype
        return np.ndarray(self.shape, "<i8", self.data)

    def largest_magnitude(self) -> float:
        """Return the largest magnitude in a float tensor: NaN if one is NaN, 0 if it is empty.

        Without their signs floats are ordered as their bits are, NaN above infinity, and NumPy
        compares integers far faster than narrow floats.
        """
        bits = self.bits()
        without_sign = np.array(2 ** (8 * self.item_bytes - 1) - 1, bits.dtype)
        largest = np.max(bits & without_sign, initial=0).astype(bits.dtype)
        return float(RawTensor(self.dtype, (), largest.tobytes()).array())

    def is_finite(self) -> bool:
        """Whether it has neither NaN nor infinity. Only for float types."""
        return math.isfinite(self.largest_magnitude())

    def is_zero(self) -> bool:
        """Whether all elements are zero. Only for float types."""
        return self.largest_magnitude() == 0.0

    def equals(self, other: "RawTensor") -> bool:
        """Whether another tensor has the same type, shape and bytes."""
        begin = slice(_PROBE_BYTES)
        if (self.dtype, self.shape, self.data[begin]) != (
            other.dtype,
            other.shape,
            other.data[begin],
        ):
            return False
        return np.array_equal(np.frombuffer(self.data, "u1"), np.frombuffer(other.data, "u1"))


@dataclasses.dataclass(frozen=True, slots=True)
class SafetensorsContent:
    tensors: dict[str, RawTensor]
    metadata: dict[str, str]


class _TensorEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    dtype: str
    shape: Annotated[tuple[int, ...], msgspec.Meta(max_length=_MAX_AXES)]
    data_offsets: tuple[int, int]


@contextlib.contextmanager
def open_bounded(path: Path, max_bytes: int) -> Iterator[tuple[io.BufferedReader, int]]:
    """Open a regular file of at most max_bytes; yields it and its size.

    Raises InvalidAdapterError or AdapterTooLargeError.
    """
    try:
        # O_NONBLOCK: opening a named pipe must not wait for a writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise InvalidAdapterError(f"cannot read {path}: {error.strerror}") from error
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        raise InvalidAdapterError(f"{path} is not a regular file")
    with os.fdopen(descriptor, "rb") as file:
        if status.st_size > max_bytes:
            raise AdapterTooLargeError(
                f"{path} has {readable_bytes(status.st_size)}; at most {readable_bytes(max_bytes)} "
                "are read"
            )
        yield file, status.st_size


def read_bounded(path: Path, max_bytes: int) -> bytearray:
    """Read a regular file of at most max_bytes. Raises as open_bounded."""
    with open_bounded(path, max_bytes) as (file, size):
        content = bytearray(size)
        if file.readinto(content) < size:
            raise InvalidAdapterError(f"{path} became shorter while it was read")
    return content


def read_tensors(path: Path, limits: StagingLimits) -> SafetensorsContent:
    """Read a whole safetensors file; the tensors are views of one buffer.

    Raises InvalidAdapterError if it is not one, to the last byte; AdapterTooLargeError if it is
    over a limit.
    """
    content = read_bounded(path, limits.max_file_bytes)
    if len(content) < _LENGTH_BYTES:
        raise InvalidAdapterError(f"{path} is not a safetensors file: it has no header")
    check_is_no_pointer(path, io.BytesIO(content[: len(_LFS_POINTER)]))
    header_bytes = int.from_bytes(content[:_LENGTH_BYTES], "little")
    if header_bytes > limits.max_header_bytes:
        raise AdapterTooLargeError(
            f"{path} declares a header of {readable_bytes(header_bytes)}; at most "
            f"{readable_bytes(limits.max_header_bytes)} are read"
        )
    data_start = _LENGTH_BYTES + header_bytes
    if data_start > len(content):
        raise InvalidAdapterError(
            f"{path} is truncated: its header has {header_bytes} bytes, the file {len(content)}"
        )
    entries, metadata = _parse_header(path, bytes(content[_LENGTH_BYTES:data_start]))
    if len(entries) > limits.max_tensors:
        raise AdapterTooLargeError(
            f"{path} declares {len(entries)} tensors; at most {limits.max_tensors} are read"
        )
    data = memoryview(content)[data_start:]
    _check_layout(path, entries, len(data))
    tensors = {
        name: RawTensor(entry.dtype, entry.shape, data[slice(*entry.data_offsets)])
        for name, entry in entries.items()
    }
    return SafetensorsContent(tensors, metadata)


def read_pieces(path: Path, name: str, piece_bytes: int) -> Iterator[RawTensor]:
    """Read one float tensor of a safetensors file, some of its rows at a time.

    Raises InvalidAdapterError if the file is none, LookupError if it has no such tensor, OSError.
    """
    with path.open("rb") as file:
        entries, data_start = _read_header(path, file)
        entry = entries[name]
        if entry.dtype not in FLOAT_TYPES or not entry.shape:
            raise LookupError(name)
        row_bytes = math.prod(entry.shape[1:]) * _ITEM_BYTES[entry.dtype]
        at_once = max(1, piece_bytes // max(1, row_bytes))
        file.seek(data_start + entry.data_offsets[0])
        for first in range(0, entry.shape[0], at_once):
            num_rows = min(at_once, entry.shape[0] - first)
            data = file.read(num_rows * row_bytes)
            if len(data) < num_rows * row_bytes:
                raise InvalidAdapterError(f"{path} is truncated")
            yield RawTensor(entry.dtype, (num_rows, *entry.shape[1:]), data)


def tensor_names(path: Path) -> Sequence[str]:
    """Read which tensors a safetensors file has. Raises InvalidAdapterError, OSError."""
    with path.open("rb") as file:
        return list(_read_header(path, file)[0])


def _read_header(path: Path, file: BinaryIO) -> tuple[dict[str, _TensorEntry], int]:
    """Return the tensors of an open file, and where their bytes begin."""
    check_is_no_pointer(path, file)
    header_bytes = int.from_bytes(file.read(_LENGTH_BYTES), "little")
    if header_bytes > path.stat().st_size:
        raise InvalidAdapterError(f"{path} is not a safetensors file")
    return _parse_header(path, file.read(header_bytes))[0], _LENGTH_BYTES + header_bytes


def check_is_no_pointer(path: Path, file: BinaryIO) -> None:
    """Raise InvalidAdapterError for the small file that stands for a large one in Git."""
    begin = file.read(len(_LFS_POINTER))
    file.seek(0)
    if begin == _LFS_POINTER:
        raise InvalidAdapterError(
            f"{path} is a pointer of Git LFS, not the file itself: run `git lfs pull` in its "
            "folder, or download it again"
        )


def _parse_header(path: Path, header: bytes) -> tuple[dict[str, _TensorEntry], dict[str, str]]:
    try:
        raw = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
        metadata = msgspec.json.decode(raw.pop(_METADATA, msgspec.Raw(b"{}")), type=dict[str, str])
        entries = {
            name: msgspec.json.decode(entry, type=_TensorEntry) for name, entry in raw.items()
        }
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidAdapterError(f"{path} has a broken safetensors header: {error}") from error
    return entries, metadata


def _check_layout(path: Path, entries: Mapping[str, _TensorEntry], data_bytes: int) -> None:
    """Check that each byte belongs to one tensor, and each tensor has the size of its shape."""
    position = 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        begin, end = entry.data_offsets
        if entry.dtype not in _ITEM_BYTES:
            raise InvalidAdapterError(f"{path}: tensor {name!r} has the unknown type {entry.dtype}")
        needed = math.prod(entry.shape) * _ITEM_BYTES[entry.dtype]
        if min(entry.shape, default=0) < 0 or begin != position or end - begin != needed:
            raise InvalidAdapterError(
                f"{path}: tensor {name!r} of shape {list(entry.shape)} and type {entry.dtype} "
                f"needs {needed} bytes from {position} on; its offsets are {begin} to {end}"
            )
        position = end
    if position != data_bytes:
        raise InvalidAdapterError(
            f"{path} is truncated or has a tail: its tensors need {position} bytes, "
            f"it has {data_bytes}"
        )


def encode_header(tensors: Mapping[str, RawTensor], metadata: Mapping[str, str]) -> bytes:
    """Return length and header of a file with the tensors in this order, without gaps."""
    sizes = [(name, one.dtype, one.shape, one.num_bytes) for name, one in tensors.items()]
    return encode_sizes(sizes, metadata)


def encode_sizes(
    tensors: Iterable[tuple[str, str, tuple[int, ...], int]], metadata: Mapping[str, str]
) -> bytes:
    """Return encode_header's result for (name, dtype, shape, number of bytes) of each tensor."""
    header: dict[str, object] = {_METADATA: dict(metadata)}
    position = 0
    for name, dtype, shape, num_bytes in tensors:
        end = position + num_bytes
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _LENGTH_BYTES)  # the data starts aligned
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text
