"""Tables for the kernels of each adapter in the pool: its offsets, ranks and scales."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch

from loraplex.core.adapter import (
    LM_HEAD,
    OUTSIDE_LAYERS,
    LoraTarget,
    TargetPart,
    head_block_size,
)
from loraplex.core.errors import AdapterMismatchError
from loraplex.execution.adapters.host_adapters import AdapterLayout, HostAdapter, TableCells
from loraplex.kernels.accelerator import Accelerator, DeviceEvent
from loraplex.kernels.adapter_parts import FACTOR, FLAGS, MAX_VECTORS, SHIFT
from loraplex.kernels.lora import DeviceLoraTable, IntArray, LoraCells, LoraTable, ModuleShapes
from loraplex.memory.adapter_pages import Placement


class EntryTables:
    """The `LoraTable` of the layers and that of lm_head; an entry is a row of both.

    On an accelerator an entry is sent in the compute queue: after the launched steps, none of which
    names it (see transfers), and ahead of those that will.
    """

    def __init__(
        self,
        num_entries: int,
        layers: Sequence[ModuleShapes],
        head: ModuleShapes | None,
        *,
        num_experts: Sequence[Mapping[str, int]] | None = None,
        alignment: int,
        max_rank: int,
        accelerator: Accelerator | None,
    ) -> None:
        """head: blocks of lm_head's outputs as modules; None if it is not adapted.

        alignment: every offset is a multiple of it. max_rank: maximum rank of an accelerator.
        """
        self._accelerator = accelerator
        self._alignment = alignment
        self._max_rank = max_rank
        self._pinned: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Pairs of each field of each table, [entries, ...], on the host and on the device."""
        self._sent: dict[int, DeviceEvent] = {}
        self._has_vectors = np.zeros(num_entries, np.bool_)
        self.layers = self._table(num_entries, LoraCells(layers, num_experts))
        self.head = None if head is None else self._table(num_entries, LoraCells([head]))

    @property
    def num_entries(self) -> int:
        return len(self.layers.ranks)

    def check(self, target: LoraTarget) -> None:
        """Raise AdapterMismatchError for an unknown layer, module or shape, or a rank too large."""
        if self._accelerator is not None and target.rank > self._max_rank:
            raise AdapterMismatchError(
                f"the adapter has rank {target.rank} on {target.module}, at most {self._max_rank} "
                "is served here"
            )
        if target.layer == OUTSIDE_LAYERS and target.module == LM_HEAD and self.head is not None:
            self._check_head(target, self.head)
            return
        layers = self.layers.cells.layers
        num_layers = len(layers)
        layer = target.layer if 0 <= target.layer < num_layers else 0
        known = layers[layer]
        shape = (target.in_features, target.out_features)
        num_experts = self.layers.cells.num_experts[layer].get(target.module, 1)
        if not 0 <= target.expert < num_experts:
            raise AdapterMismatchError(
                f"the adapter targets expert {target.expert} of {target.module}; the model has "
                f"{num_experts}"
            )
        if not 0 <= target.layer < num_layers or known.get(target.module) != shape:
            raise AdapterMismatchError(
                f"the adapter targets layer {target.layer} {target.module} {shape}; "
                f"the model has {num_layers} layers of {known} (in_features, out_features)"
            )

    def clear(self, entry: int) -> None:
        """Set all ranks of an entry to 0, and forget its vectors. Call this ahead of `write`."""
        if entry in self._sent:
            self._sent.pop(entry).wait()
        self.layers.ranks[entry] = 0
        if self.layers.vectors is not None:
            self.layers.vectors[entry] = 0
        self._has_vectors[entry] = False
        if self.head is not None:
            self.head.ranks[entry] = 0

    def layout_of(self, adapter: HostAdapter, placement: Placement) -> AdapterLayout:
        """Return the entry of an adapter, apart from its pages. Raises as `check`."""
        places = {spot.target: spot for spot in placement.places}
        layers, head = [], []
        for weight in adapter.weights:
            target = weight.target
            self.check(target)
            _, page_index, offset = places[target]
            where = (page_index, offset, target.rank, weight.scale)
            if target.layer == OUTSIDE_LAYERS:
                assert self.head is not None
                head.append((target.first // self.head.cells.shapes[0][1], *where))
            else:
                cell = self.layers.cells.by_place[target.layer, target.module, target.expert]
                layers.append((cell, *where))
        return AdapterLayout(placement, _table_cells(layers), _table_cells(head))

    def write(self, entry: int, layout: AdapterLayout, page_starts: IntArray) -> None:
        """Write an adapter. page_starts: first element of the pool of each of its pages."""
        for table, of_table in ((self.layers, layout.layers), (self.head, layout.head)):
            if table is not None:
                cells = of_table.cells
                table.offsets[entry, cells] = page_starts[of_table.pages] + of_table.offsets
                table.ranks[entry, cells] = of_table.ranks
                table.scales[entry, cells] = of_table.scales

    def write_vectors(
        self, entry: int, vectors: Iterable[tuple[LoraTarget, int]]
    ) -> frozenset[tuple[int, str]]:
        """Write vectors of an adapter, in the order in which they are applied.

        vectors: the pieces, each with its first element of the pool. Returns the (layer, module)
        whose vectors the table has: none without an accelerator, and none of a linear layer with a
        vector in several pieces, which a page of a very small `max_lora_rank` may need.
        """
        table = self.layers
        if table.vectors is None:
            return frozenset()
        by_place: dict[tuple[int, str], list[tuple[LoraTarget, int]]] = {}
        for target, first in vectors:
            by_place.setdefault((target.layer, target.module), []).append((target, first))
        written = set()
        for place, found in by_place.items():
            if place not in table.cells:
                continue
            cell = table.cells.by_place[(*place, 0)]
            if all(target.out_features == table.cells.shapes[cell][1] for target, _ in found):
                words = [
                    first // table.alignment * FLAGS + _flags(target) for target, first in found
                ]
                table.vectors[entry, cell, : len(words)] = words
                written.add(place)
        self._has_vectors[entry] = bool(written)
        return frozenset(written)

    def have_vectors(self, entries: IntArray) -> bool:
        """Return whether the table has vectors of any of these entries."""
        return bool(self._has_vectors[entries].any())

    def send(self, entry: int) -> None:
        """Send a written entry to the accelerator, if there is one."""
        if self._accelerator is None:
            return
        with self._accelerator.compute():
            for pinned, on_device in self._pinned:
                self._accelerator.copy(pinned[entry], on_device[entry])
            self._sent[entry] = self._accelerator.event()

    def _table(self, num_entries: int, cells: LoraCells) -> LoraTable:
        shape = (num_entries, len(cells))
        table = LoraTable(
            cells=cells,
            offsets=np.zeros(shape, np.int64),
            ranks=np.zeros(shape, np.int32),
            scales=np.zeros(shape, np.float32),
            alignment=self._alignment,
            max_rank=self._max_rank,
        )
        return table if self._accelerator is None else self._with_copy(table, self._accelerator)

    def _with_copy(self, table: LoraTable, accelerator: Accelerator) -> LoraTable:
        """Return the table in pinned memory, with a copy on the accelerator's device."""
        pairs = []
        vectors = np.zeros((*table.ranks.shape, MAX_VECTORS), np.int32)
        for values in (table.offsets, table.ranks, table.scales, vectors):
            on_host = torch.from_numpy(values)
            pinned = accelerator.pinned(tuple(on_host.shape), on_host.dtype)
            with accelerator.compute():
                on_device = torch.zeros_like(on_host, device=accelerator.device)
            pairs.append((pinned, on_device))
        self._pinned += pairs
        offsets, ranks, scales, vectors = (pinned.numpy() for pinned, _ in pairs)
        copy = DeviceLoraTable(*(tensor for _, tensor in pairs))
        return dataclasses.replace(
            table, offsets=offsets, ranks=ranks, scales=scales, vectors=vectors, on_device=copy
        )

    @staticmethod
    def _check_head(target: LoraTarget, head: LoraTable) -> None:
        shapes = head.cells.shapes
        index, rest = divmod(target.first, shapes[0][1])
        shape = (target.in_features, target.out_features)
        if rest or index >= len(shapes) or shapes[index] != shape:
            vocab_size = sum(outputs for _, outputs in shapes)
            raise AdapterMismatchError(
                f"the adapter targets lm_head {shape} from output {target.first} on; the model has "
                f"{shapes[0][0]} to {vocab_size}, in blocks of {shapes[0][1]}"
            )


def _flags(target: LoraTarget) -> int:
    """Return the flags of a vector's word."""
    if target.part is not TargetPart.FACTOR:
        return SHIFT
    return FACTOR | SHIFT if target.rank == 2 else FACTOR


def _table_cells(found: Sequence[tuple[int, int, int, int, float]]) -> TableCells:
    """found: cell, page index, offset, rank and scale of each target."""
    cells, pages, offsets, ranks, scales = zip(*found, strict=True) if found else ((),) * 5
    return TableCells(
        np.array(cells, np.int64),
        np.array(pages, np.int64),
        np.array(offsets, np.int64),
        np.array(ranks, np.int32),
        np.array(scales, np.float32),
    )


def head_modules(layers: Sequence[ModuleShapes], hidden_size: int, vocab_size: int) -> ModuleShapes:
    """Return lm_head in blocks of outputs, each as a module of its own."""
    largest = max(sum(shape) for layer in layers for shape in layer.values())
    size = head_block_size(largest, hidden_size)
    return {
        f"{LM_HEAD}.{first}": (hidden_size, min(size, vocab_size - first))
        for first in range(0, vocab_size, size)
    }
