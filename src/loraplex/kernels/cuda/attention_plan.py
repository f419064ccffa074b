"""What is worked out for a step before its layers run: which rows go to which program.

A step that only decodes needs nothing from the host: its programs find all in the DeviceRows, so a
graph of it can be replayed for other rows. In a mixed one the rows of one token are listed, and the
others' queries are cut into tiles.
"""

import dataclasses
import functools

import numpy as np
import numpy.typing as npt
import torch

from loraplex.kernels.cuda.flashinfer_attention import FlashInferPlan
from loraplex.kernels.ops import AttentionRules, AttentionShape, DeviceRows, RowLayout

IntArray = npt.NDArray[np.int32]

_ALIGNMENT = 4
"""Alignment of lists within one tensor, in elements: programs expect pointers of 16 bytes."""


@dataclasses.dataclass(frozen=True, slots=True)
class CudaAttentionPlan:
    """One step's rows, for the layers with one set of rules."""

    shape: AttentionShape
    rules: AttentionRules
    rows: DeviceRows
    max_seq_len: int
    """Maximum length of a row in such tables."""
    num_tokens: int | None
    """Tokens of a step that does not only decode; None: any number, row r computes token r."""
    decode_rows: torch.Tensor | None = None
    """[n, 2] int32: (row, token) of rows with one token; None: all, or none. Of a batch-invariant
    step always given, and like `tiles`."""
    tiles: torch.Tensor | None = None
    """[n, 4] int32: (row, first token, number of queries, tokens from its first query to the row's
    end)."""

    slopes: torch.Tensor | None = None
    """[H] float32: the rules' ALiBi slopes, at an address that stays."""
    flashinfer: FlashInferPlan | None = None
    """Instead of the programs, for queries of its dtype, and without sink logits or biases."""

    @property
    def only_decodes(self) -> bool:
        return self.num_tokens is None

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All that a graph of the step reads."""
        rows, lists = self.rows, (self.decode_rows, self.tiles)
        fixed = (rows.seq_lens, rows.table_rows, rows.block_tables)
        return (*fixed, *(each for each in lists if each is not None))


def device_rows(rows: RowLayout, device: torch.device) -> DeviceRows:
    """rows.on_device, or made from the lists."""
    if rows.on_device is not None:
        return rows.on_device
    num_rows = len(rows.seq_lens)
    numbers = [*rows.query_start_loc, *rows.seq_lens, *range(num_rows)]
    parts = torch.from_numpy(np.array(numbers, dtype=np.int32)).to(device, non_blocking=True)
    sizes = [num_rows + 1, num_rows, num_rows]
    query_start_loc, seq_lens, table_rows = torch.split(parts, sizes)
    tables = rows.block_tables.to(device=device, dtype=torch.int32)
    # Copies, so that each is aligned.
    return DeviceRows(query_start_loc, seq_lens.clone(), table_rows.clone(), tables)


def only_decodes(rows: RowLayout) -> bool:
    """Whether every row computes one token."""
    return rows.query_start_loc[-1] == len(rows.seq_lens)


def listed_rows(
    rows: RowLayout, tile_queries: int, device: torch.device, *, decode_as_tiles: bool
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """(rows of one token, tiles of at most tile_queries tokens), as CudaAttentionPlan has them.

    decode_as_tiles: rows of one token come as tiles, too, so the first list has rows like tiles.
    """
    starts = np.asarray(rows.query_start_loc, dtype=np.int32)
    counts = np.diff(starts)
    (single,) = np.nonzero(counts == 1)
    decode = np.stack((single, starts[single]), axis=1)
    if decode_as_tiles:
        decode = np.concatenate((decode, np.ones_like(decode)), axis=1)
    tiles = _tiles(starts, counts, np.asarray(rows.seq_lens), tile_queries)
    return _to_device(decode.astype(np.int32), tiles, device)


def _tiles(starts: IntArray, counts: IntArray, seq_lens: IntArray, tile_queries: int) -> IntArray:
    """Tiles of the rows with several tokens; those with the most keys first, so none ends late."""
    (several,) = np.nonzero(counts > 1)
    num_tiles = -(-counts[several] // tile_queries)
    row = np.repeat(several, num_tiles)
    first = np.arange(len(row)) - np.repeat(num_tiles.cumsum() - num_tiles, num_tiles)
    first = first * tile_queries
    behind = counts[row] - first
    tiles = np.stack((row, starts[row] + first, np.minimum(behind, tile_queries), behind), axis=1)
    order = np.argsort(behind - seq_lens[row], kind="stable")
    return tiles[order].astype(np.int32)


def _to_device(
    decode: IntArray, tiles: IntArray, device: torch.device
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Copy both arrays at once."""
    gap = -decode.size % _ALIGNMENT
    numbers = np.concatenate((decode.ravel(), np.zeros(gap, np.int32), tiles.ravel()))
    sent = torch.from_numpy(numbers).to(device, non_blocking=True)
    first_tile = decode.size + gap
    return (
        sent[: decode.size].view(decode.shape) if len(decode) else None,
        sent[first_tile:].view(tiles.shape) if len(tiles) else None,
    )


def decode_tiles(num_rows: int, device: torch.device) -> torch.Tensor:
    """[num_rows, 4]: row r computes token r."""
    rows = torch.arange(num_rows, dtype=torch.int32, device=device)
    ones = torch.ones_like(rows)
    return torch.stack((rows, rows, ones, ones), dim=1)


@functools.cache
def num_shares(num_programs: int, num_slots: int, max_shares: int) -> int:
    """Number of shares into which the keys of a row are cut, so that programs fill the GPU.

    num_programs: without shares; num_slots: that run at once. The programs run in waves; the fewest
    shares are taken whose last wave leaves little of the card idle.
    """

    def efficiency(shares: int) -> float:
        waves = num_programs * shares / num_slots
        return waves / -(-num_programs * shares // num_slots)

    choices = range(1, max(1, max_shares) + 1)
    good = _GOOD_ENOUGH * max(map(efficiency, choices))
    return next(shares for shares in choices if efficiency(shares) >= good)


_GOOD_ENOUGH = 0.85
