"""What the launchers of LoRA share: fused linear layers, and the work of one call."""

import dataclasses
import math

import numpy as np
import torch
import triton
import triton.language as tl

from loraplex.kernels.adapter_parts import MAX_VECTORS
from loraplex.kernels.cuda.programs.lora import Cells, LoraConstants, Pieces
from loraplex.kernels.cuda.ranks import RankSums
from loraplex.kernels.lora import DeviceLoraTable, LoraCells, LoraPlace, LoraSegments, LoraTable

_ALIGNMENT = 16
"""Elements. Where all begins at a multiple of it, matrices are read by 16 bytes at a time."""

MATRIX_RANKS = 32
"""Ranks that a program with matrix units takes at a time; a multiple of those of other ones."""


@dataclasses.dataclass(frozen=True, slots=True)
class FusedLinear:
    """A fused linear layer: some modules of a table with one input."""

    first_cell: int
    """First of the modules' cells, among those of an entry."""
    columns: tuple[int, ...]
    """Offsets of the modules from first_cell. Layers of one form share them, and a program."""
    in_features: int
    out_features: tuple[int, ...]
    out_offsets: tuple[int, ...]
    is_aligned: bool


LinearKey = tuple[LoraCells, int, LoraPlace]
"""A table's cells and alignment, and the fused linear layer."""


@dataclasses.dataclass(frozen=True, slots=True)
class LoraWork:
    """What the two kernels of one call share."""

    linear: FusedLinear
    table: DeviceLoraTable
    pool: torch.Tensor
    segments: LoraSegments
    cells_of_entry: int
    unit: int
    """Elements in which the table counts where vectors lie."""
    max_rank: int
    """Rounded up to what a program takes at a time."""
    sums: RankSums | None
    """Sums over the ranks that have a part of the inputs each; None: this one has all."""
    most_splits: int
    """Maximum splits of the inputs, where rows are computed one by one."""

    @property
    def num_modules(self) -> int:
        return len(self.linear.columns)

    def partials(self, num_splits: int) -> torch.Tensor:
        """Uninitialised sums of x A^T [slots, modules, splits, ranks]."""
        num_slots = self.segments.token_indices.shape[0]
        shape = (num_slots, self.num_modules, num_splits, self.max_rank)
        return torch.empty(shape, dtype=torch.float32, device=self.pool.device)

    def over_ranks(self, partials: torch.Tensor) -> torch.Tensor:
        """Return the sums [..., splits, ranks] as the second kernel takes them."""
        return partials if self.sums is None else self.sums.total_of_splits(partials)

    def num_tiles(self, width: int) -> int:
        """Number of tiles of all modules' outputs; a tile is of one module."""
        return sum(triton.cdiv(size, width) for size in self.linear.out_features)

    @property
    def cells(self) -> Cells:
        table = self.table
        return Cells(table.offsets, table.ranks, table.scales, table.vectors)

    @property
    def pieces(self) -> Pieces:
        pieces = self.segments
        return Pieces(
            *(pieces.entries, pieces.starts, pieces.counts),
            *(pieces.token_indices, pieces.token_scales),
        )

    @property
    def constants(self) -> LoraConstants:
        """The constants that both programs are compiled for."""
        linear = self.linear
        values = (linear.in_features, self.max_rank, linear.is_aligned)
        return LoraConstants(*map(tl.constexpr, values))


def fused_linear(cells: LoraCells, alignment: int, place: LoraPlace) -> FusedLinear:
    """Return what launches need to know of a fused linear layer."""
    indices = [cells.by_place[place.layer, module, 0] for module in place.modules]
    out_offsets = place.out_offsets
    first_cell = min(indices)
    columns = tuple(index - first_cell for index in indices)
    in_features = {cells.shapes[index][0] for index in indices}
    assert len(in_features) == 1, "modules of one linear layer have one input"
    out_features = tuple(cells.shapes[index][1] for index in indices)
    common = math.gcd(alignment, *in_features, *out_features, *out_offsets)
    is_aligned = common % _ALIGNMENT == 0
    return FusedLinear(
        first_cell, columns, in_features.pop(), out_features, out_offsets, is_aligned
    )


def table_on_device(table: LoraTable) -> DeviceLoraTable:
    """Return the table that a kernel reads: its own arrays where the device is the host."""
    if table.on_device is not None:
        return table.on_device
    vectors = table.vectors
    if vectors is None:
        vectors = np.zeros((*table.ranks.shape, MAX_VECTORS), np.int32)
    return DeviceLoraTable(
        torch.from_numpy(table.offsets),
        torch.from_numpy(table.ranks),
        torch.from_numpy(table.scales),
        torch.from_numpy(vectors),
    )
