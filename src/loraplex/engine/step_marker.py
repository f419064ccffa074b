"""Marker of the requests in the present steps, which survives the death of the engine.

The engine writes, and serving reads once the engine is dead. Data in a mapped file is visible to
other processes at once, whatever kills the writer.
"""

import mmap
import struct
from pathlib import Path

from loraplex.core.request import RequestId

MAX_ROWS = 8192
"""Maximum number of rows of a step that are marked; the others are left out."""
MAX_STEPS = 2
"""Maximum number of steps in flight."""

_COUNT = struct.Struct("=Q")
_SLOT_BYTES = _COUNT.size * (1 + MAX_ROWS)
NUM_BYTES = MAX_STEPS * _SLOT_BYTES


class StepMarker:
    """One record for each step in flight: a count, and that many request ids."""

    def __init__(self, memory: bytearray | mmap.mmap | None = None) -> None:
        """memory: NUM_BYTES shared with the reader; None for an engine in a thread."""
        self._memory = bytearray(NUM_BYTES) if memory is None else memory

    def begin(self, step_id: int, request_ids: tuple[RequestId, ...]) -> None:
        """Mark a step that is about to be launched, of at most MAX_STEPS with successive ids."""
        start = self._start_of(step_id)
        marked = request_ids[:MAX_ROWS]
        struct.pack_into(f"={len(marked)}Q", self._memory, start + _COUNT.size, *marked)
        # The count last: a reader never takes old ids for new ones.
        _COUNT.pack_into(self._memory, start, len(marked))

    def end(self, step_id: int) -> None:
        """Clear a step whose result was absorbed, or that failed while the engine lives."""
        _COUNT.pack_into(self._memory, self._start_of(step_id), 0)

    def request_ids(self) -> frozenset[RequestId]:
        """Return the requests of all steps in flight."""
        found: set[RequestId] = set()
        for slot in range(MAX_STEPS):
            start = self._start_of(slot)
            (count,) = _COUNT.unpack_from(self._memory, start)
            found.update(struct.unpack_from(f"={count}Q", self._memory, start + _COUNT.size))
        return frozenset(found)

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
