"""Where the rows of a step find what was stored of their earlier positions, and their states."""

from typing import NamedTuple

import torch


class StoredRows(NamedTuple):
    """Rows of a step, and where a cache group stores their positions.

    Row r has the tokens query_start_loc[r] up to query_start_loc[r + 1], at positions that follow
    one another. Rows may have no tokens, and tokens at the end no row: they are padding.
    """

    query_start_loc: torch.Tensor  # [R + 1] int64
    positions: torch.Tensor  # [T] int64
    places: torch.Tensor  # [T] int64
    """Where the token is stored: block * block_size + offset; -1: it is not."""
    table_starts: torch.Tensor  # [R] int64
    """Where the block table of a row begins in `tables`."""
    tables: torch.Tensor  # [any] int64; on an accelerator int32
    """Block tables: position p lies in the block of entry table_starts[r] + p // block_size, if p
    is a position that the cache group keeps."""


class StatePlan(NamedTuple):
    """Where rows read and write states, and the positions since the last one.

    The other fields are those of StoredRows, in the group of the chunk. Draft tokens are tokens of
    their row. No row reads a state that its step writes.
    """

    query_start_loc: torch.Tensor  # [R + 1] int64
    positions: torch.Tensor  # [T] int64
    reads: torch.Tensor  # [R] int64
    """State after the last border before a row's first token, or at it; -1: zero."""
    writes: torch.Tensor  # [T] int64
    """State that ends with the token; -1: none is written."""
    places: torch.Tensor  # [T] int64
    table_starts: torch.Tensor  # [R] int64
    tables: torch.Tensor  # [any] int64; on an accelerator int32

    @property
    def stored(self) -> StoredRows:
        """Return the rows, and where their positions are stored."""
        return StoredRows(
            self.query_start_loc, self.positions, self.places, self.table_starts, self.tables
        )
