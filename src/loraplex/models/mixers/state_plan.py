"""What mixers with recurrent states read of a step: one plan for all with the same groups."""

from collections.abc import Callable
from typing import NamedTuple

import torch

from loraplex.core.plan import CacheGroupId
from loraplex.kernels.ops import Kernels
from loraplex.models.batch import ForwardBatch


class StatePlan(NamedTuple):
    """Where rows read and write states, and the positions since the last one.

    Row r has the tokens query_start_loc[r] up to query_start_loc[r + 1], at positions that follow
    one another, and draft tokens are tokens of their row. Rows may have no tokens, and tokens at
    the end no row: they are padding. No row reads a state that its step writes.
    """

    query_start_loc: torch.Tensor  # [R + 1] int64
    positions: torch.Tensor  # [T] int64
    reads: torch.Tensor  # [R] int64
    """State after the last border before a row's first token, or at it; -1: zero."""
    writes: torch.Tensor  # [T] int64
    """State that ends with the token; -1: none is written."""
    places: torch.Tensor  # [T] int64
    """Where the token is stored in the group of the chunk: block * block_size + offset; or -1."""
    table_starts: torch.Tensor  # [R] int64
    """Where the block table of a row begins in `tables`."""
    tables: torch.Tensor  # [any] int64; on an accelerator int32
    """Block tables of the group of the chunk: position p lies in the block of entry
    table_starts[r] + p // block_size, if p is a position that the chunk's group keeps (Chunk)."""


class StateKind(NamedTuple):
    """Kind of plan, by the groups in which a mixer keeps its states and the positions since."""

    states: CacheGroupId
    chunk: CacheGroupId

    def planner(
        self, _kernels: Kernels, _device: torch.device
    ) -> Callable[[ForwardBatch], StatePlan]:
        return self.plan

    def plan(self, batch: ForwardBatch) -> StatePlan:
        """Make the plan of a step; on an accelerator it has the addresses of the batch."""
        rows, layout = batch.state_rows, batch.rows[self.chunk]
        assert rows is not None, "the runner finds the groups of states in its capacity"
        on_device = layout.on_device
        tables = layout.block_tables if on_device is None else on_device.block_tables
        return StatePlan(
            rows.query_start_loc,
            batch.positions,
            rows.reads[self.states],
            batch.slot_mappings[self.states],
            batch.slot_mappings[self.chunk],
            rows.table_starts[self.chunk],
            tables.flatten(),
        )
