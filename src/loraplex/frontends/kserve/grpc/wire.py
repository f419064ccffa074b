"""Reading of protobuf messages whose size in memory is bounded before an object is made.

Two bytes on the wire may become an object of hundreds of bytes. So the fields of a message are
counted in its bytes, by its descriptor, and only a message within the limits is parsed.

Source of the wire format: "Encoding" in protobuf's documentation.
"""

import functools
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError

from loraplex.core.errors import InvalidRequestError, PayloadTooLargeError
from loraplex.frontends.body_limits import parsed

MAX_FIELDS: Final = 16_384
"""Fields in a message and its parts; one input of a request has about five."""
MAX_PARSED_BYTES: Final = 16 << 20
"""Bytes that protobuf copies; large tensors are in `raw_input_contents`, which are not copied."""
_FIXED_SIZES: Final = {
    **dict.fromkeys(
        (FieldDescriptor.TYPE_DOUBLE, FieldDescriptor.TYPE_FIXED64, FieldDescriptor.TYPE_SFIXED64),
        8,
    ),
    **dict.fromkeys(
        (FieldDescriptor.TYPE_FLOAT, FieldDescriptor.TYPE_FIXED32, FieldDescriptor.TYPE_SFIXED32),
        4,
    ),
}
_MAX_VARINT_BYTES: Final = 10
_LENGTH_DELIMITED: Final = 2
"""Wire type of bytes, messages and packed numbers."""


class Parsed(NamedTuple):
    """A message, and the contents of a field that were left out of it."""

    message: Any
    raw: tuple[memoryview, ...] = ()


class _MessageForm(msgspec.Struct, frozen=True):
    """Fields of a message class that may stand for many objects."""

    parts: Mapping[int, "_MessageForm"]
    """Messages within it, by the number of their field."""
    packed: Mapping[int, int]
    """Repeated numbers, by the number of their field: bytes of each, 0 where they vary."""


def _form_of(descriptor: Descriptor) -> _MessageForm:
    parts, packed = {}, {}
    for field in descriptor.fields:
        if field.message_type is not None:
            parts[field.number] = _form_of(field.message_type)
        elif field.is_packed:
            packed[field.number] = _FIXED_SIZES.get(field.type, 0)
    return _MessageForm(parts, packed)


class MessageReader:
    """Reader of messages of one class."""

    def __init__(self, message_class: Any, max_values: int, raw_field: str = "") -> None:
        """Create a reader.

        raw_field: a field of bytes that is returned as it stands in the message, without a copy.
        """
        self._parse = message_class.FromString
        self._form = _form_of(message_class.DESCRIPTOR)
        self._max_values = max_values
        fields = message_class.DESCRIPTOR.fields_by_name
        self._raw_tag = fields[raw_field].number << 3 | _LENGTH_DELIMITED if raw_field else 0

    async def read(self, data: bytes) -> Parsed:
        """Read a message, as read_now does, in a thread if it is long."""
        return await parsed(len(data), functools.partial(self.read_now, data))

    def read_now(self, data: bytes) -> Parsed:
        """Raise InvalidRequestError for other bytes, PayloadTooLargeError beyond the limits."""
        counter = _Counter(self._max_values)
        kept, raw, begin = [], [], 0
        view = memoryview(data)
        try:
            for tag, start, at, end in counter.fields(data, 0, len(data)):
                if tag == self._raw_tag:
                    kept.append(view[begin:start])
                    raw.append(view[at:end])
                    begin = end
                else:
                    counter.count(self._form, tag, data, at, end)
            kept.append(view[begin:])
            _check_bytes(sum(map(len, kept)))
            return Parsed(self._parse(b"".join(kept) if raw else data), tuple(raw))
        except (DecodeError, IndexError) as error:
            reason = "it ends early" if isinstance(error, IndexError) else error
            raise InvalidRequestError(f"the request is not a valid message: {reason}") from None


class _Counter:
    """Counts fields and repeated numbers of one message up to the limits."""

    def __init__(self, max_values: int) -> None:
        self._max_values = max_values
        self._num_fields = self._num_values = 0

    def fields(self, data: bytes, at: int, end: int) -> Iterator[tuple[int, int, int, int]]:
        """Yield (tag, start, start of the content, end) of each field in data[at:end]."""
        while at < end:
            self._num_fields += 1
            if self._num_fields > MAX_FIELDS:
                raise PayloadTooLargeError(
                    f"the message has more than {MAX_FIELDS} fields; send the elements of a tensor "
                    "in raw_input_contents"
                )
            start = at
            tag, at = _varint(data, at)
            match tag & 7:
                case 0:  # a varint
                    content, at = at, _varint(data, at)[1]
                case 1:  # 64 bits
                    content, at = at, at + 8
                case 5:  # 32 bits
                    content, at = at, at + 4
                case 2:  # _LENGTH_DELIMITED: a length, and so many bytes
                    length, content = _varint(data, at)
                    at = content + length
                case kind:
                    raise InvalidRequestError(
                        f"the request is not a valid message: wire type {kind} is not supported"
                    )
            if at > end:
                raise IndexError
            yield tag, start, content, at

    def count(self, form: _MessageForm, tag: int, data: bytes, at: int, end: int) -> None:
        """Count the content of a field, and of the fields within it."""
        number = tag >> 3
        part = form.parts.get(number)
        if part is not None and tag & 7 == _LENGTH_DELIMITED:
            for inner, _, content, inner_end in self.fields(data, at, end):
                self.count(part, inner, data, content, inner_end)
        elif number in form.packed:
            self._num_values += self._length(form.packed[number], data, at, end)
            if self._num_values > self._max_values:
                raise PayloadTooLargeError(
                    f"the message has more than {self._max_values} repeated numbers "
                    "(max_request_values); send the elements of a tensor in raw_input_contents"
                )

    def _length(self, size: int, data: bytes, at: int, end: int) -> int:
        """Count the elements of a packed field, or return a number beyond the limit."""
        if size:
            return (end - at) // size
        if end - at > _MAX_VARINT_BYTES * self._max_values:
            return self._max_values + 1
        # The last byte of a varint is the one without the highest bit.
        return int(np.count_nonzero(np.frombuffer(data, np.uint8, end - at, at) < 0x80))


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Return (value, end). Raises IndexError if the data end within it."""
    value = shift = 0
    while shift < 7 * _MAX_VARINT_BYTES:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
    raise InvalidRequestError("the request is not a valid message: a varint is too long")


def _check_bytes(num_bytes: int) -> None:
    if num_bytes > MAX_PARSED_BYTES:
        raise PayloadTooLargeError(
            f"the message has {num_bytes} bytes outside of raw_input_contents; at most "
            f"{MAX_PARSED_BYTES} are allowed: send large tensors in raw_input_contents"
        )
