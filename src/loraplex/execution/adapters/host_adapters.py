"""Adapters in host memory.

The loader's thread writes them, the bank reads them. The adapter cache (memory) decides which
adapters are here.
"""

import dataclasses
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch

from loraplex.core.adapter import AdapterHandle, LoraTarget
from loraplex.execution.adapters.pinned_pages import PageLease
from loraplex.kernels.lora import IntArray
from loraplex.memory.adapter_pages import Placement


@dataclasses.dataclass(frozen=True, slots=True)
class HostWeight:
    """LoRA of one linear layer, in the dtype of its file."""

    target: LoraTarget
    a: torch.Tensor  # [rank, in_features]
    b: torch.Tensor  # [out_features, rank]
    scale: float
    """Scale of the adapter: alpha / rank, or its file's value. A float32 value."""


@dataclasses.dataclass(frozen=True, slots=True)
class HostPart:
    """Piece of an adapter other than LoRA, in the dtype of its file."""

    target: LoraTarget
    values: torch.Tensor
    """Values [rank, out_features] of the target; [out_features] of a vector."""
    scale: float = 1.0
    """Factor of a shift."""
    indices: torch.Tensor | None = None
    """Ids [rank] int64 of trained tokens."""
    is_base: bool = False
    """Whether the rows replace the base's own parameter: a tied parameter changes, too."""
    is_quotient: bool = False
    """Whether the magnitudes of a factor are divided by the norms already."""


@dataclasses.dataclass(frozen=True, slots=True)
class TableCells:
    """Content of an adapter's entry in one table: arrays with an element for each target."""

    cells: IntArray
    pages: IntArray
    """Index in the adapter's own pages."""
    offsets: IntArray
    """Offset in elements from the start of the page."""
    ranks: npt.NDArray[np.int32]
    scales: npt.NDArray[np.float32]


@dataclasses.dataclass(frozen=True, slots=True)
class AdapterLayout:
    """Places of an adapter's pieces, and its entry in the tables of the bank."""

    placement: Placement
    layers: TableCells
    head: TableCells


@dataclasses.dataclass(frozen=True, slots=True)
class HostAdapter:
    """Adapter in host memory."""

    digest: str
    weights: tuple[HostWeight, ...]
    """LoRA weights, in the order of AdapterSource.targets."""
    parts: tuple[HostPart, ...] = ()
    """Other parts, in the same order."""
    factors: Mapping[tuple[int, str], torch.Tensor] = dataclasses.field(default_factory=dict)
    """DoRA factors of the outputs, float64, by layer and module; AdapterBank.prepare sets them."""
    layout: AdapterLayout | None = None
    """None: AdapterBank.prepare has not set it yet."""
    packed: PageLease | None = None
    """Pages laid out as in the pool, for an accelerator; then the pieces have no values."""

    @property
    def num_bytes(self) -> int:
        if self.packed is not None:
            return self.packed.num_bytes
        weights = sum(weight.a.nbytes + weight.b.nbytes for weight in self.weights)
        return weights + sum(part.values.nbytes for part in self.parts)


HostAdapters = dict[AdapterHandle, HostAdapter]
"""Adapters in host memory. The loader's thread adds them and the runner's reads them: each call of
a dict's own methods is whole, whichever thread makes it."""
