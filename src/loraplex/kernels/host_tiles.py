"""Rows in tiles of one fixed number, for products that torch computes on the host."""

from collections.abc import Iterator

import torch

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
