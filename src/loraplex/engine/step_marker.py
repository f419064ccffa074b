"""Which requests are in the steps that run right now: told to whoever survives the engine.

The engine writes, serving reads once the engine is dead. What is written into a mapped file is
there for others at once, whatever kills the writer.
"""

import mmap
import struct
from pathlib import Path

from loraplex.core.request import RequestId

MOST_ROWS = 8192
"""Of one step. What is beyond is not told."""
MOST_STEPS = 2
"""In flight at the same time."""

_COUNT = struct.Struct("=Q")
_SLOT_BYTES = _COUNT.size * (1 + MOST_ROWS)
NUM_BYTES = MOST_STEPS * _SLOT_BYTES


class StepMarker:
    """A slot for each step in flight: a count, and so many request ids."""

    def __init__(self, memory: bytearray | mmap.mmap | None = None) -> None:
        """memory: NUM_BYTES of it, that whoever reads has, too; None: for a thread's engine."""
        self._memory = bytearray(NUM_BYTES) if memory is None else memory

    def begin(self, step_id: int, request_ids: tuple[RequestId, ...]) -> None:
        """A step is about to be launched. At most MOST_STEPS steps with successive ids run."""
        start = self._start_of(step_id)
        told = request_ids[:MOST_ROWS]
        struct.pack_into(f"={len(told)}Q", self._memory, start + _COUNT.size, *told)
        # The count last: a reader never takes old ids for new ones.
        _COUNT.pack_into(self._memory, start, len(told))

    def end(self, step_id: int) -> None:
        """What the step gave was taken in, or it failed and the engine lives."""
        _COUNT.pack_into(self._memory, self._start_of(step_id), 0)

    def request_ids(self) -> frozenset[RequestId]:
        """Of all steps in flight."""
        found: set[RequestId] = set()
        for slot in range(MOST_STEPS):
            start = self._start_of(slot)
            (count,) = _COUNT.unpack_from(self._memory, start)
            found.update(struct.unpack_from(f"={count}Q", self._memory, start + _COUNT.size))
        return frozenset(found)

    def _start_of(self, step_id: int) -> int:
        return step_id % MOST_STEPS * _SLOT_BYTES


def create_marker_file(path: Path) -> StepMarker:
    """Make the file of an engine that is about to be started. Raises OSError."""
    path.write_bytes(bytes(NUM_BYTES))
    return open_marker_file(path)


def open_marker_file(path: Path) -> StepMarker:
    """The engine's end, or the reader's. Raises OSError."""
    with path.open("r+b") as file:
        return StepMarker(mmap.mmap(file.fileno(), NUM_BYTES))
