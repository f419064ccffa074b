"""Large tensors of zeros on the host, which take memory only where they are touched."""

import math
import mmap

import torch


def zeroed(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return zeros, aligned to a page. Nothing is written: the system provides pages on demand."""
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes == 0:
        return torch.zeros(shape, dtype=dtype)
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)  # fewer misses of the TLB over scattered blocks
    return torch.frombuffer(memory, dtype=dtype).view(shape)
