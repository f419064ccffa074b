"""JSON of long responses, converted and encoded a few elements at a time.

msgspec keeps the interpreter's lock for the whole of one call, so an event loop would wait for the
encoding of a large response even if a thread does it. Between the pieces of a `LongList` other
threads run, and each piece's objects are gone when the next one's are made.
"""

import asyncio
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, TypeVar, overload

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

T = TypeVar("T")

SENT_BYTES: Final = 256 << 10
"""Bytes of a long response that are sent at a time: the next ones follow when the client has read
most of them."""

_PIECE_LENGTH: Final = 128
"""Elements that one call encodes. One position of a prompt may have 21 log probabilities."""
_MARK: Final = b"\0"
"""Place of a long list in the text around it: JSON has no such byte, in a string neither."""


class LongList(Sequence[T]):
    """Elements that are made of others when they are read or encoded.

    It is equal to a list of the same elements.
    """

    __slots__ = ("_convert", "_from", "_piece_length")

    def __init__(
        self,
        elements: Sequence[Any],
        convert: Callable[[Any], T] = lambda element: element,
        *,
        piece_length: int = _PIECE_LENGTH,
    ) -> None:
        self._from = elements
        self._convert = convert
        self._piece_length = piece_length

    def __len__(self) -> int:
        return len(self._from)

    def __iter__(self) -> Iterator[T]:
        return map(self._convert, self._from)

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> list[T]: ...
    def __getitem__(self, index: int | slice) -> T | list[T]:
        if isinstance(index, slice):
            return list(map(self._convert, self._from[index]))
        return self._convert(self._from[index])

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, list | LongList):
            return NotImplemented
        return len(self) == len(other) and all(map(_are_equal, self, other))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(list(self))

    def encoded(self) -> Iterator[bytes]:
        """Yield the pieces of the JSON list."""
        elements, mark = iter(self), b"["
        while piece := list(itertools.islice(elements, self._piece_length)):
            first, *others = encoded(piece)
            *inner, last = first[1:], *others
            yield mark
            yield from inner
            yield last[:-1]
            mark = b","
        yield b"[]" if mark == b"[" else b"]"


def _are_equal(one: object, other: object) -> bool:
    return one == other


def encoded(body: Any) -> list[bytes]:
    """Return the pieces of the JSON of an object, which may hold long lists."""
    long_lists: list[LongList[Any]] = []

    def mark(value: Any) -> msgspec.Raw:
        if not isinstance(value, LongList):
            raise NotImplementedError(f"no JSON for {type(value).__name__}")
        long_lists.append(value)
        return msgspec.Raw(_MARK)

    text = msgspec.json.encode(body, enc_hook=mark)
    if not long_lists:
        return [text]
    first, *others = text.split(_MARK)
    pieces = [first]
    for long_list, following in zip(long_lists, others, strict=True):
        pieces += long_list.encoded()
        pieces.append(following)
    return pieces


class LongResponse(Response):
    """Response whose body is in pieces, which are never joined: a copy would take a while, too."""

    def __init__(self, pieces: Sequence[bytes], status: int, media_type: str) -> None:
        self._pieces = pieces
        super().__init__(b"", status, media_type=media_type)
        self.headers["content-length"] = str(sum(map(len, pieces)))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        del scope, receive
        start = {"type": "http.response.start", "status": self.status_code}
        await send({**start, "headers": self.raw_headers})
        await send_pieces(self._pieces, send)


async def send_pieces(pieces: Iterable[bytes | memoryview], send: Send) -> None:
    """Send a body, a part at a time."""
    last: bytes | memoryview = b""
    for part in parts_of(pieces):
        if last:
            await send({"type": "http.response.body", "body": last, "more_body": True})
            await asyncio.sleep(0)  # a client that reads fast would keep the event loop busy
        last = part
    await send({"type": "http.response.body", "body": last})


def parts_of(pieces: Iterable[bytes | memoryview]) -> Iterator[bytes | memoryview]:
    """Yield the bytes of pieces in parts of about SENT_BYTES: short ones joined, long ones cut."""
    waiting: list[bytes | memoryview] = []
    num_bytes = 0
    for piece in pieces:
        if len(piece) > SENT_BYTES:
            if waiting:
                yield b"".join(waiting)
                waiting, num_bytes = [], 0
            view = memoryview(piece).cast("B")
            yield from (view[at : at + SENT_BYTES] for at in range(0, len(view), SENT_BYTES))
            continue
        waiting.append(piece)
        num_bytes += len(piece)
        if num_bytes > SENT_BYTES:
            yield b"".join(waiting)
            waiting, num_bytes = [], 0
    if waiting:
        yield b"".join(waiting)
