"""Host memory that an accelerator copies by itself, in pages of one size that are used again.

Pinning takes long, and pinned memory is not given back to the system. So it is taken in large
chunks as it is first needed, and kept: what is pinned is what was in use at the most, rounded up to
a chunk. A chunk has a power of two of bytes, which is what torch would take for it anyhow.
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
_LEAST_PAGES, _MOST_PAGES = 8, 256
"""Of a chunk: with few, up to an eighth is lost at its end; many small ones take long to count."""


@dataclasses.dataclass(frozen=True, eq=False)
class PageLease:
    """Some pages. They are given back when nobody refers to this object any more."""

    pages: tuple[torch.Tensor, ...]  # each [page_elements]

    @property
    def num_bytes(self) -> int:
        return sum(page.nbytes for page in self.pages)


class PinnedPages:
    """Safe to use from any thread."""

    def __init__(self, accelerator: Accelerator, page_elements: int, dtype: torch.dtype) -> None:
        self._accelerator = accelerator
        self._page_elements = page_elements
        self._dtype = dtype
        page_bytes = page_elements * dtype.itemsize
        wanted = max(_LEAST_PAGES * page_bytes, min(_CHUNK_BYTES, _MOST_PAGES * page_bytes))
        self._chunk_elements = (1 << (wanted - 1).bit_length()) // dtype.itemsize
        self._free: list[torch.Tensor] = []
        self._num_chunks = 0
        self._lock = threading.Lock()

    @property
    def num_bytes(self) -> int:
        """Pinned so far."""
        return self._num_chunks * self._chunk_elements * self._dtype.itemsize

    def take(self, num_pages: int) -> PageLease:
        """What is in them is anything."""
        with self._lock:
            while len(self._free) < num_pages:
                self._grow()
            pages = tuple(self._free.pop() for _ in range(num_pages))
        lease = PageLease(pages)
        weakref.finalize(lease, self._give_back, pages).atexit = False
        return lease

    def _give_back(self, pages: Sequence[torch.Tensor]) -> None:
        # Atomic; and this may interrupt the very thread that holds the lock.
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
