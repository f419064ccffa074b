"""Tensors on the wire: their JSON, binary and typed-list forms.

Knows no model and no protocol message. A bad tensor is an InvalidTensorError that names the
tensor, what came and what would be right.

In memory a tensor is what it is in the binary form; `array` makes a numpy array of it. BYTES is
then an array of `bytes` objects. BF16 is an array of its bit patterns, as uint16: numpy has no
bfloat16, and its numbers are not read here.

Source of the forms: the KServe v2 protocol and Triton's binary tensor data extension.
"""

import dataclasses
import itertools
import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from loraplex.core.errors import InvalidTensorError
from loraplex.frontends.long_json import LongList

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
    limits: tuple[float, float] = (0, 0)
    """The least and the greatest finite number."""
    contents: str = ""
    """Field of InferTensorContents with typed values; FP16 and BF16 travel in binary only."""


def _row(name: str, code: str, contents: str = "") -> Datatype:
    dtype, element = np.dtype(f"<{code}"), struct.Struct(f"<{code}")
    return Datatype(name, f"TYPE_{name}", dtype, code, element, _limits(dtype), contents)


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
            _row("BOOL", "?", "bool_contents"),
            _row("UINT8", "B", "uint_contents"),
            _row("UINT16", "H", "uint_contents"),
            _row("UINT32", "I", "uint_contents"),
            _row("UINT64", "Q", "uint64_contents"),
            _row("INT8", "b", "int_contents"),
            _row("INT16", "h", "int_contents"),
            _row("INT32", "i", "int_contents"),
            _row("INT64", "q", "int64_contents"),
            _row("FP16", "e"),
            _row("BF16", "H"),
            _row("FP32", "f", "fp32_contents"),
            _row("FP64", "d", "fp64_contents"),
            Datatype("BYTES", "TYPE_STRING", None, contents="bytes_contents"),
        )
    }
)


Array = npt.NDArray[Any]

MAX_RANK = 8
MAX_ELEMENTS = 2**31 - 1
_COPIED_BYTES = 1 << 16
"""A larger array is not copied: meanwhile no other thread would run."""
MAX_STRINGS = 2**16
"""Elements of a BYTES tensor, each of which becomes an object."""
_NUM_LISTED = 4096
"""Values of a tensor that become Python objects at a time."""


class Tensor(msgspec.Struct, frozen=True, eq=False):
    name: str
    datatype: str
    shape: tuple[int, ...]
    data: bytes | memoryview = b""
    """Bytes of a numeric tensor: little-endian, row-major."""
    strings: Sequence[bytes] = ()
    """Elements of a BYTES tensor, row-major."""

    @classmethod
    def of(cls, name: str, datatype: str, array: Array) -> "Tensor":
        """Make a tensor of an array like that of `array`."""
        wire_dtype = DATATYPES[datatype].wire_dtype
        if wire_dtype is None:
            return cls(name, datatype, array.shape, strings=array.ravel().tolist())
        own = np.ascontiguousarray(array, wire_dtype)
        data = own.tobytes() if own.nbytes <= _COPIED_BYTES else own.data.cast("B")
        return cls(name, datatype, array.shape, data)

    @property
    def array(self) -> Array:
        """Made anew each time; of numbers it is a view that cannot be written."""
        wire_dtype = DATATYPES[self.datatype].wire_dtype
        if wire_dtype is None:
            return np.array(self.strings, dtype=object).reshape(self.shape)
        return np.ndarray(self.shape, wire_dtype, self.data)

    @property
    def num_bytes(self) -> int:
        """Size of the elements, excluding the lengths before strings."""
        return len(self.data) + sum(map(len, self.strings))

    def rows(self, first: int, end: int) -> "Tensor":
        """Elements [first, end) of the first dimension, in row-major order."""
        shape = self.shape[1:]
        if self.strings:
            return Tensor(self.name, self.datatype, shape, strings=self.strings[first:end])
        size = DATATYPES[self.datatype].element.size
        data = memoryview(self.data)[first * size : end * size]
        return Tensor(self.name, self.datatype, shape, data)

    def element(self, index: int) -> Any:
        """One in row-major order, as Python has it."""
        if self.strings:
            return self.strings[index]
        element = DATATYPES[self.datatype].element
        return element.unpack_from(self.data, index * element.size)[0]


def form_of(
    name: str, datatype: object, shape: Sequence[object]
) -> tuple[Datatype, tuple[int, ...]]:
    """Check what a client sent for tensor `name`: a data type, and a shape that is not too deep and
    has no negative and no absurd dimension."""
    row = DATATYPES.get(datatype) if isinstance(datatype, str) else None
    if row is None:
        raise InvalidTensorError(
            f"tensor '{name}' has datatype {datatype!r}; the datatypes are {', '.join(DATATYPES)}",
            param=name,
        )
    size = 1
    for dim in shape:
        if type(dim) is not int or dim < 0:
            raise InvalidTensorError(
                f"tensor '{name}' has shape {list(shape)}; a shape is a list of integers that are "
                "not negative",
                param=name,
            )
        size *= dim or 1
    if len(shape) > MAX_RANK or size > MAX_ELEMENTS:
        raise InvalidTensorError(
            f"tensor '{name}' has shape {list(shape)}; at most {MAX_RANK} dimensions and "
            f"{MAX_ELEMENTS} elements are allowed",
            param=name,
        )
    if row.wire_dtype is None and (count := math.prod(shape)) > MAX_STRINGS:  # type: ignore[arg-type]
        raise InvalidTensorError(
            f"tensor '{name}' has {count} elements; at most {MAX_STRINGS} of BYTES are allowed",
            param=name,
        )
    return row, tuple(shape)  # type: ignore[arg-type]  # all are int by now


# ---------------------------------------------------------------- the binary form


def from_raw(
    name: str, datatype: object, shape: Sequence[object], data: bytes | memoryview
) -> Tensor:
    """A tensor from its raw bytes: little-endian, row-major, BYTES with length prefixes."""
    row, dims = form_of(name, datatype, shape)
    if row.wire_dtype is None:
        return Tensor(name, row.name, dims, strings=_split_strings(name, dims, data))
    _check_num_bytes(name, row, dims, len(data))
    return Tensor(name, row.name, dims, data)


def check_raw_size(name: str, datatype: object, shape: Sequence[object], num_bytes: int) -> None:
    """Raise InvalidTensorError if no raw tensor of that type and shape has so many bytes."""
    row, dims = form_of(name, datatype, shape)
    if row.wire_dtype is not None:
        _check_num_bytes(name, row, dims, num_bytes)


def _check_num_bytes(name: str, row: Datatype, dims: tuple[int, ...], num_bytes: int) -> None:
    expected = math.prod(dims) * row.element.size
    if num_bytes != expected:
        raise InvalidTensorError(
            f"input byte size mismatch for input '{name}'. Expected {expected} ({row.name} of "
            f"shape {list(dims)}), got {num_bytes}",
            param=name,
        )


def _split_strings(name: str, dims: tuple[int, ...], data: bytes | memoryview) -> list[bytes]:
    """The elements of a BYTES tensor: each a 32-bit length and so many bytes."""
    elements: list[bytes] = []
    expected = math.prod(dims)
    offset = 0
    num_bytes = len(data)
    while offset < num_bytes and len(elements) <= expected:
        start = offset + LENGTH_PREFIX.size
        if start > num_bytes:
            raise _broken_strings(name, f"{num_bytes - offset} bytes are left for a length prefix")
        (length,) = LENGTH_PREFIX.unpack_from(data, offset)
        offset = start + length
        if offset > num_bytes:
            raise _broken_strings(
                name, f"element {len(elements)} says {length} bytes, {num_bytes - start} are left"
            )
        elements.append(bytes(data[start:offset]))
    if len(elements) != expected:
        raise _wrong_count(name, dims, len(elements))
    return elements


def _broken_strings(name: str, problem: str) -> InvalidTensorError:
    return InvalidTensorError(
        f"input byte size mismatch for input '{name}'. Each BYTES element is a 4-byte "
        f"little-endian length and so many bytes; {problem}",
        param=name,
    )


def to_raw(tensor: Tensor) -> bytes:
    """The binary form; the inverse of from_raw."""
    if tensor.datatype == "BYTES":
        prefix = LENGTH_PREFIX.pack
        return b"".join([prefix(len(element)) + element for element in tensor.strings])
    return bytes(tensor.data)


# ---------------------------------------------------------------- lists of values


def from_json(name: str, datatype: object, shape: Sequence[object], data: object) -> Tensor:
    """A tensor from JSON `data`: a flat list in row-major order, or lists nested as the shape."""
    row, dims = form_of(name, datatype, shape)
    if not row.contents:
        raise InvalidTensorError(
            f"receiving {datatype} data via JSON is not supported. Please use the binary data "
            f"format for input {name}",
            param=name,
        )
    values = _flattened(name, data, max(len(dims), 1))
    return from_values(name, row.name, dims, values)


def _flattened(name: str, data: object, depth: int) -> list[object]:
    if not isinstance(data, list) or depth == 0:
        raise InvalidTensorError(
            f"the data of tensor '{name}' must be a list of values, flat or nested as its shape",
            param=name,
        )
    if not any(isinstance(item, list) for item in data):
        return data
    return [value for item in data for value in _flattened(name, item, depth - 1)]


def from_values(name: str, datatype: str, shape: Sequence[int], values: Sequence[object]) -> Tensor:
    """A tensor from Python values in row-major order; strings are encoded as UTF-8."""
    row, dims = form_of(name, datatype, shape)
    if len(values) != math.prod(dims):
        raise _wrong_count(name, dims, len(values))
    if row.wire_dtype is None:
        return Tensor(name, datatype, dims, strings=_encoded(name, values))
    _check_types(name, row, row.wire_dtype.kind, values)
    return Tensor(name, datatype, dims, struct.pack(f"<{len(values)}{row.code}", *values))


def _wrong_count(name: str, dims: tuple[int, ...], count: int) -> InvalidTensorError:
    return InvalidTensorError(
        f"tensor '{name}' has {count} elements; its shape {list(dims)} takes {math.prod(dims)}",
        param=name,
    )


def _encoded(name: str, values: Sequence[object]) -> list[bytes]:
    encoded = []
    for value in values:
        if not isinstance(value, str | bytes):
            raise _wrong_value(name, "BYTES", value, "a string")
        try:
            encoded.append(value.encode() if isinstance(value, str) else value)
        except UnicodeEncodeError:
            raise _wrong_value(name, "BYTES", value, "text that UTF-8 can encode") from None
    return encoded


def _check_types(name: str, row: Datatype, kind: str, values: Sequence[Any]) -> None:
    """Python's bool is an int, and numpy casts nearly everything: so look at every value."""
    low, high = row.limits
    types = set(map(type, values))
    is_plain = types == {int} and kind != "b"
    is_plain |= types == {float} and kind == "f" and math.isfinite(sum(values))
    # Integers, or finite floats for a type of floats: found without a loop.
    if is_plain and low <= min(values) and max(values) <= high:
        return
    for value in values:
        if type(value) is bool or kind == "b":
            fits = type(value) is bool and kind == "b"
        elif type(value) is float and kind == "f":
            fits = low <= value <= high or not math.isfinite(value)
        else:
            fits = type(value) is int and low <= value <= high
        if not fits:
            raise _wrong_value(name, row.name, value, _right_value(row, kind))


def _right_value(row: Datatype, kind: str) -> str:
    low, high = row.limits
    match kind:
        case "b":
            return "true or false"
        case "f":
            return f"a number in [{low:g}, {high:g}]"
        case _:
            return f"an integer in [{low}, {high}]"


def _wrong_value(name: str, datatype: str, value: object, right: str) -> InvalidTensorError:
    shown = repr(value)
    shown = shown if len(shown) <= 40 else shown[:40] + "..."
    return InvalidTensorError(
        f"tensor '{name}' holds {shown}; an element of type {datatype} must be {right}", param=name
    )


def to_values(tensor: Tensor) -> list[Any]:
    """Flat Python values for JSON.

    Raises InvalidTensorError if BYTES are not UTF-8, and for a type that travels in binary only.
    """
    row = DATATYPES[tensor.datatype]
    if not row.contents:
        raise InvalidTensorError(
            f"sending {tensor.datatype} data via JSON is not supported. Please use the binary data "
            f"format for output {tensor.name}",
            param=tensor.name,
        )
    if row.wire_dtype is None:
        return to_texts(tensor.name, tensor.strings)
    return list(struct.unpack(f"<{math.prod(tensor.shape)}{row.code}", tensor.data))


def long_values(tensor: Tensor) -> Sequence[Any]:
    """Return the values of `to_values`, many of them for an encoding in pieces."""
    if math.prod(tensor.shape) <= _NUM_LISTED:
        return to_values(tensor)
    row = DATATYPES[tensor.datatype]
    if row.wire_dtype is None or not row.contents:
        return LongList(to_values(tensor), piece_length=_NUM_LISTED)
    return LongList(_Numbers(tensor, row.code), piece_length=_NUM_LISTED)


class _Numbers(Sequence[Any]):
    """Elements of a numeric tensor, made when they are read."""

    def __init__(self, tensor: Tensor, code: str) -> None:
        self._tensor = tensor
        self._code = code

    def __len__(self) -> int:
        return math.prod(self._tensor.shape)

    def __iter__(self) -> Iterator[Any]:
        unpacked = struct.iter_unpack(f"<{self._code}", self._tensor.data)
        return itertools.chain.from_iterable(unpacked)

    def __getitem__(self, index: Any) -> Any:
        return self._tensor.element(index)


def to_texts(name: str, elements: Sequence[bytes]) -> list[str]:
    """Elements of BYTES tensor `name`. Raises InvalidTensorError if one is not UTF-8."""
    try:
        return [element.decode() for element in elements]
    except UnicodeDecodeError as error:
        raise InvalidTensorError(
            f"tensor '{name}' is not UTF-8 text: byte {error.start} of {error.object[:20]!r} "
            "cannot be decoded",
            param=name,
        ) from None


# ---------------------------------------------------------------- tensors that we make


def strings(name: str, texts: Sequence[str]) -> Tensor:
    """A BYTES tensor of shape [len(texts)]."""
    return string_tensor(name, texts, (len(texts),))


def string_tensor(name: str, texts: Sequence[str], shape: tuple[int, ...]) -> Tensor:
    """A BYTES tensor of a shape that takes as many elements as there are texts."""
    return Tensor(name, "BYTES", shape, strings=[text.encode() for text in texts])


def numbers(name: str, datatype: str, values: object) -> Tensor:
    """A tensor of the shape that the nested sequences have."""
    return Tensor.of(name, datatype, np.array(values, dtype=DATATYPES[datatype].wire_dtype))


def to_bf16(array: Array) -> Array:
    """The bit patterns of float32 numbers as BF16: rounded to nearest, halves to even."""
    bits = np.ascontiguousarray(array, np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(array), np.uint32(0x7FC0), rounded).astype(np.uint16)
