"""Marker of an engine's progress and of the requests in its steps.

The engine writes. Serving reads the progress while the engine lives, and the requests once it is
dead. Data in a mapped file is visible to other processes at once, whatever stops or kills the
writer.
"""

import mmap
import struct
from pathlib import Path
from typing import NamedTuple

from loraplex.core.request import RequestId

MAX_ROWS = 8192
"""Maximum number of rows of a step that are marked; the others are left out."""
MAX_STEPS = 16
"""Maximum number of steps in flight."""

_NUMBER = struct.Struct("=Q")
_IDS = 2 * _NUMBER.size
"""Place of the request ids in a record, after their count and the number of tokens."""
_SLOT_BYTES = _IDS + _NUMBER.size * MAX_ROWS
_BEATS = MAX_STEPS * _SLOT_BYTES
_LAST_WORDS = _BEATS + _NUMBER.size
_WORDS = struct.Struct("=HB500s")
"""Number of bytes of the reason, whether it is a kill, and the reason."""
NUM_BYTES = _LAST_WORDS + _WORDS.size


class Progress(NamedTuple):
    """Reading of an engine's marker. Two that are equal mean that the engine did nothing."""

    num_beats: int
    """Number of times that the loop took commands, or began or ended a step."""
    num_tokens: int = 0
    """Number of tokens of the steps in flight; 0 between steps."""
    is_stopped: bool = False
    """Whether a signal stopped the process."""


class LastWords(NamedTuple):
    """Reason why an engine ends itself."""

    reason: str
    is_kill: bool
    """Whether something outside killed a part of it."""


class StepMarker:
    """A counter, the reason of the end, and one record for each step in flight: two counts, and the
    request ids."""

    def __init__(self, memory: bytearray | mmap.mmap | None = None) -> None:
        """memory: NUM_BYTES shared with the reader; None for an engine in a thread."""
        self._memory = bytearray(NUM_BYTES) if memory is None else memory
        self._num_beats = 0

    def beat(self) -> None:
        """Note that the engine's loop is alive."""
        self._num_beats += 1
        _NUMBER.pack_into(self._memory, _BEATS, self._num_beats)

    def begin(self, step_id: int, request_ids: tuple[RequestId, ...], num_tokens: int = 0) -> None:
        """Mark a step that is about to be launched, of at most MAX_STEPS with successive ids."""
        start = self._start_of(step_id)
        marked = request_ids[:MAX_ROWS]
        struct.pack_into(f"={len(marked)}Q", self._memory, start + _IDS, *marked)
        _NUMBER.pack_into(self._memory, start + _NUMBER.size, num_tokens)
        # The count last: a reader never takes old ids for new ones.
        _NUMBER.pack_into(self._memory, start, len(marked))
        self.beat()

    def end(self, step_id: int) -> None:
        """Clear a step whose result was absorbed, or that failed while the engine lives."""
        struct.pack_into("=QQ", self._memory, self._start_of(step_id), 0, 0)
        self.beat()

    def note_end(self, reason: str, *, is_kill: bool = False) -> None:
        """Note why the engine is about to end itself. Only the first reason counts."""
        if self.last_words() is None:
            text = reason.encode()[: _WORDS.size - 3]
            _WORDS.pack_into(self._memory, _LAST_WORDS, len(text), is_kill, text)

    def last_words(self) -> LastWords | None:
        """Return why the engine ended itself; None if it did not."""
        length, is_kill, text = _WORDS.unpack_from(self._memory, _LAST_WORDS)
        return LastWords(text[:length].decode(errors="replace"), bool(is_kill)) if length else None

    def progress(self) -> Progress:
        """Return what the engine did until now."""
        tokens = (self._number(self._start_of(slot) + _NUMBER.size) for slot in range(MAX_STEPS))
        return Progress(self._number(_BEATS), sum(tokens))

    def request_ids(self) -> frozenset[RequestId]:
        """Return the requests of all steps in flight."""
        found: set[RequestId] = set()
        for slot in range(MAX_STEPS):
            start = self._start_of(slot)
            count = self._number(start)
            found.update(struct.unpack_from(f"={count}Q", self._memory, start + _IDS))
        return frozenset(found)

    def _number(self, start: int) -> int:
        (number,) = _NUMBER.unpack_from(self._memory, start)
        return int(number)

    def _start_of(self, step_id: int) -> int:
        return step_id % MAX_STEPS * _SLOT_BYTES


def create_marker_file(path: Path) -> StepMarker:
    """Create the file of an engine that is about to be started. Raises OSError."""
    path.write_bytes(bytes(NUM_BYTES))
    return open_marker_file(path)


def open_marker_file(path: Path) -> StepMarker:
    """Open the file, for the engine or the reader. Raises OSError."""
    with path.open("r+b") as file:
        return StepMarker(mmap.mmap(file.fileno(), NUM_BYTES))
