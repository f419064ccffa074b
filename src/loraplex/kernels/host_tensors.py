"""Tensors on the host: zeros that take memory where they are touched, products in tiles of rows."""

import math
import mmap
from collections.abc import Iterator

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


_TILE_ROWS = 16
_MIN_COLUMNS = 16
"""Columns from which on a row's place in its tile does not matter (measured for MKL: 12)."""


def fixed_tiles(values: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield at least one tile of a fixed number of rows on the host, the last padded with zeros.

    A host matmul chooses its order of summation by the number of rows; with tiles, a token's bits
    do not depend on how many others share its adapter. A device takes all rows at once.
    """
    if values.device.type != "cpu":
        yield values
        return
    padding = -len(values) % _TILE_ROWS if len(values) else _TILE_ROWS
    padded = torch.nn.functional.pad(values, (0, 0, 0, padding))
    yield from padded.view(-1, _TILE_ROWS, values.shape[1]).unbind(0)


def tiled_product(rows: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """rows [n, k] @ matrix [k, m], float32: a row's bits depend neither on the others nor on n."""
    num_columns = matrix.shape[1]
    if matrix.device.type == "cpu" and num_columns < _MIN_COLUMNS:
        matrix = torch.nn.functional.pad(matrix, (0, _MIN_COLUMNS - num_columns))
    tiles = [torch.mm(tile, matrix) for tile in fixed_tiles(rows)]
    return torch.cat(tiles)[: len(rows), :num_columns]
