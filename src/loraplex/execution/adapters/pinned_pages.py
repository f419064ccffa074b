"""Pinned host memory, which an accelerator copies by itself, in reusable pages of one size.

Pinning is slow, and pinned memory is not returned to the system. So it is allocated in large chunks
when it is first needed, and kept: the pinned memory is the maximum that was in use, rounded up to a
chunk. The size of a chunk is a power of two, to which torch would round it anyhow.
"""

import dataclasses
import logging
import threading
import time
import weakref
from collections.abc import Sequence

import torch

from loraplex.kernels.accelerator import Accelerator

logger = logging.getLogger(__name__)

_CHUNK_BYTES = 1 << 26
_MIN_PAGES, _MAX_PAGES = 8, 256
"""Pages of a chunk: with few, up to an eighth is lost at its end; many are slow to count."""


@dataclasses.dataclass(frozen=True, eq=False)
class PageLease:
    """Lease of pages, which are free again when no reference to this object is left."""

    pages: tuple[torch.Tensor, ...]  # each [page_elements]

    @property
    def num_bytes(self) -> int:
        return sum(page.nbytes for page in self.pages)


class PinnedPages:
    """Pool of pinned pages. Safe to use from any thread."""

    def __init__(self, accelerator: Accelerator, page_elements: int, dtype: torch.dtype) -> None:
        self._accelerator = accelerator
        self._page_elements = page_elements
        self._dtype = dtype
        page_bytes = page_elements * dtype.itemsize
        wanted = max(_MIN_PAGES * page_bytes, min(_CHUNK_BYTES, _MAX_PAGES * page_bytes))
        self._chunk_elements = (1 << (wanted - 1).bit_length()) // dtype.itemsize
        self._free: list[torch.Tensor] = []
        self._num_chunks = 0
        self._lock = threading.Lock()

    @property
    def num_bytes(self) -> int:
        """Size of the memory pinned so far."""
        return self._num_chunks * self._chunk_elements * self._dtype.itemsize

    def take(self, num_pages: int) -> PageLease:
        """Take pages with undefined contents."""
        with self._lock:
            while len(self._free) < num_pages:
                self._grow()
            pages = tuple(self._free.pop() for _ in range(num_pages))
        lease = PageLease(pages)
        weakref.finalize(lease, self._free_pages, pages).atexit = False
        return lease

    def _free_pages(self, pages: Sequence[torch.Tensor]) -> None:
        # Without the lock: extend is atomic, and a finalizer may interrupt the thread that has it.
        self._free.extend(pages)

    def _grow(self) -> None:
        start = time.monotonic()
        chunk = self._accelerator.pinned((self._chunk_elements,), self._dtype)
        self._num_chunks += 1
        num_pages = self._chunk_elements // self._page_elements
        pages = chunk[: num_pages * self._page_elements].view(num_pages, self._page_elements)
        self._free.extend(reversed(pages.unbind()))
        seconds = time.monotonic() - start
        logger.debug(
            "pinned %d MiB of host memory in %.2f s; %d MiB so far",
            *(chunk.nbytes >> 20, seconds, self.num_bytes >> 20),
        )
