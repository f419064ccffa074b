"""The device tier: one preallocated pool of adapter pages, and the table of what lies where.

Which adapter gets which pages is decided by the adapter cache (memory); the arithmetic inside them
is memory.adapter_pages, which both share.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from loraplex.core.adapter import AdapterHandle, LoraTarget
from loraplex.core.errors import AdapterMismatchError
from loraplex.core.plan import PageGeometry, PageId
from loraplex.execution.host_adapters import HostAdapter, HostWeight
from loraplex.kernels.lora import LoraBatch, LoraGroup, LoraTable
from loraplex.memory.adapter_pages import place

AdapterRow = tuple[int, tuple[tuple[AdapterHandle, float], ...]]
"""One row of a step: its number of tokens, and its (handle, scale)s; empty is the base model."""

_TokenSpans = list[tuple[int, int, float]]
"""(first token, number of tokens, scale) of the rows that use one adapter."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Resident:
    entry: int
    page_ids: tuple[PageId, ...]


class AdapterBank:
    """Owns the pool tensor [num_pages * page_elements] and the LoraTable.

    An adapter is placed by its true rank, never padded. Pages that a copy names are taken from
    whoever had them, and that adapter is forgotten: the cache gives away only pages that no
    launched plan needs. Invariant: each page belongs to at most one adapter.
    """

    def __init__(
        self,
        geometry: PageGeometry,
        num_pages: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        num_layers: int,
        modules: Mapping[str, tuple[int, int]],
    ) -> None:
        """modules: (in_features, out_features) of every linear layer that may be adapted."""
        self._geometry = geometry
        self._pool = torch.zeros(num_pages * geometry.page_elements, dtype=dtype, device=device)
        shape = (num_pages, num_layers, len(modules))
        self._table = LoraTable(
            modules=tuple(modules),
            shapes=tuple(modules.values()),
            offsets=np.zeros(shape, np.int64),
            ranks=np.zeros(shape, np.int32),
            scales=np.zeros(shape, np.float32),
        )
        self._free_entries = list(range(num_pages))
        self._residents: dict[AdapterHandle, _Resident] = {}
        self._owners: dict[PageId, AdapterHandle] = {}

    @property
    def num_bytes(self) -> int:
        return self._pool.nbytes

    def holds(self, handle: AdapterHandle) -> bool:
        return handle in self._residents

    def copy(self, handle: AdapterHandle, host: HostAdapter, page_ids: Sequence[PageId]) -> None:
        """Copy an adapter into pages, any ones in any order; lora_batch may then name its handle.

        Raises AdapterMismatchError if it targets a layer, module or shape that the bank does not
        have, before anything is changed.
        """
        placement = place(host.targets, self._geometry)
        assert placement.num_pages == len(set(page_ids)) == len(page_ids), "the pages it needs"
        weights = {weight.target: weight for weight in host.weights}
        for target in weights:
            self._check(target)
        self._evict(handle, page_ids)
        entry = self._free_entries.pop()
        self._table.ranks[entry] = 0
        for target, page_index, offset in placement.places:
            start = page_ids[page_index] * self._geometry.page_elements + offset
            self._write(entry, weights[target], start)
        self._residents[handle] = _Resident(entry, tuple(page_ids))
        self._owners.update(dict.fromkeys(page_ids, handle))

    def lora_batch(self, rows: Sequence[AdapterRow]) -> LoraBatch | None:
        """Group the tokens of a step by adapter; None if no row uses one.

        Row i's tokens follow row i - 1's. Every handle must be in the bank. Scale 0 is the base
        model.
        """
        spans: dict[tuple[int, AdapterHandle], _TokenSpans] = {}
        first = 0
        for num_tokens, adapters in rows:
            for position, (handle, scale) in enumerate(adapters):
                if scale != 0.0 and num_tokens > 0:
                    spans.setdefault((position, handle), []).append((first, num_tokens, scale))
            first += num_tokens
        if not spans:
            return None
        ordered = sorted(spans.items(), key=lambda item: item[0][0])
        groups = tuple(self._group(handle, of_handle) for (_, handle), of_handle in ordered)
        return LoraBatch(self._pool, self._table, groups)

    def check(self) -> None:
        """Nothing is lost and nothing is counted twice."""
        entries = [resident.entry for resident in self._residents.values()]
        assert sorted(entries + self._free_entries) == list(range(len(self._table.ranks)))
        owned = {
            page_id: handle
            for handle, resident in self._residents.items()
            for page_id in resident.page_ids
        }
        assert owned == self._owners
        assert sum(len(r.page_ids) for r in self._residents.values()) == len(owned)

    def _group(self, handle: AdapterHandle, spans: _TokenSpans) -> LoraGroup:
        device = self._pool.device
        indices = np.concatenate([np.arange(first, first + n) for first, n, _ in spans])
        scales = np.repeat(
            np.array([scale for _, _, scale in spans], np.float32), [n for _, n, _ in spans]
        )
        return LoraGroup(
            self._residents[handle].entry,
            torch.from_numpy(indices).to(device),
            torch.from_numpy(scales).to(device),
        )

    def _check(self, target: LoraTarget) -> None:
        known = dict(zip(self._table.modules, self._table.shapes, strict=True))
        num_layers = self._table.ranks.shape[1]
        shape = (target.in_features, target.out_features)
        if not 0 <= target.layer < num_layers or known.get(target.module) != shape:
            raise AdapterMismatchError(
                f"the adapter targets layer {target.layer} {target.module} {shape}; "
                f"the model has {num_layers} layers of {known} (in_features, out_features)"
            )

    def _evict(self, handle: AdapterHandle, page_ids: Sequence[PageId]) -> None:
        """Forget the adapters whose pages are overwritten, and an older copy of this one."""
        gone = {self._owners[page_id] for page_id in page_ids if page_id in self._owners}
        for victim in sorted(gone | ({handle} & self._residents.keys())):
            resident = self._residents.pop(victim)
            self._free_entries.append(resident.entry)
            for page_id in resident.page_ids:
                del self._owners[page_id]

    def _write(self, entry: int, weight: HostWeight, start: int) -> None:
        """Write A, then B transposed, at element `start` of the pool, and note the place."""
        target = weight.target
        middle = start + target.rank * target.in_features
        end = middle + target.rank * target.out_features
        self._pool[start:middle].view(target.rank, target.in_features).copy_(weight.a)
        self._pool[middle:end].view(target.rank, target.out_features).copy_(weight.b.t())
        cell = (entry, target.layer, self._table.modules.index(target.module))
        self._table.offsets[cell] = start
        self._table.ranks[cell] = target.rank
        self._table.scales[cell] = weight.scale
