"""What mixers read of a step that keep states, or stored positions of whole rows.

There is one plan for all mixers with the same cache groups.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from loraplex.core.plan import CacheGroupId
from loraplex.kernels.ops import Kernels, Storage
from loraplex.kernels.states import StatePlan, StoredRows
from loraplex.models.batch import ForwardBatch
from loraplex.models.mixers.mixer import MixerInputs


class StoredKind(NamedTuple):
    """Kind of plan, by the group in which a mixer keeps positions, which is read by whole rows."""

    cache_group: CacheGroupId

    def planner(
        self, _kernels: Kernels, _device: torch.device
    ) -> Callable[[ForwardBatch], StoredRows]:
        return self.plan

    def plan(self, batch: ForwardBatch) -> StoredRows:
        """Make the plan of a step; on an accelerator it has the addresses of the batch."""
        rows, layout = batch.state_rows, batch.rows[self.cache_group]
        assert rows is not None, "the runner finds groups that are read by whole rows"
        on_device = layout.on_device
        tables = layout.block_tables if on_device is None else on_device.block_tables
        return StoredRows(
            rows.query_start_loc,
            batch.positions,
            batch.slot_mappings[self.cache_group],
            rows.table_starts[self.cache_group],
            tables.flatten(),
        )


class StateKind(NamedTuple):
    """Kind of plan, by the groups in which a mixer keeps its states and the positions since."""

    states: CacheGroupId
    chunk: CacheGroupId

    def planner(
        self, _kernels: Kernels, _device: torch.device
    ) -> Callable[[ForwardBatch], StatePlan]:
        return self.plan

    def of(self, inputs: MixerInputs, layer: int) -> tuple[StatePlan, Storage, Storage]:
        """Return the plan of a step, and a layer's storages of the chunk and of the states."""
        plan = inputs.plans[self]
        chunk, states = (inputs.storages[group][layer] for group in (self.chunk, self.states))
        assert isinstance(plan, StatePlan)
        assert chunk is not None
        assert states is not None
        return plan, chunk, states

    def plan(self, batch: ForwardBatch) -> StatePlan:
        """Make the plan of a step, as StoredKind does."""
        stored, rows = StoredKind(self.chunk).plan(batch), batch.state_rows
        assert rows is not None
        return StatePlan(
            stored.query_start_loc,
            stored.positions,
            rows.reads[self.states],
            batch.slot_mappings[self.states],
            stored.places,
            stored.table_starts,
            stored.tables,
        )
