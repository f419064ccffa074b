"""Rows in tiles of one fixed number, for products that torch computes on the host."""

from collections.abc import Iterator

import torch

_TILE_ROWS = 16


def fixed_tiles(values: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield tiles of one fixed number of rows on the host, the last one padded with zeros.

    A host matmul chooses its order of summation by the number of rows; with tiles, a token's bits
    do not depend on how many others share its adapter. A device takes all rows at once.
    """
    if values.device.type != "cpu":
        yield values
        return
    padded = torch.nn.functional.pad(values, (0, 0, 0, -len(values) % _TILE_ROWS))
    yield from padded.view(-1, _TILE_ROWS, values.shape[1]).unbind(0)


def tiled_product(rows: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """rows [n, k] @ matrix [k, m], float32: a row's bits do not depend on the others."""
    tiles = [torch.mm(tile, matrix) for tile in fixed_tiles(rows)]
    return torch.cat(tiles)[: len(rows)]
