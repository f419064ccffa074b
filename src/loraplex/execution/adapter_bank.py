"""The device tier: one preallocated pool of adapter pages, and the table of what lies where.

Which adapter gets which pages is decided by the adapter cache (memory); the arithmetic inside them
is memory.adapter_pages, which both share.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from loraplex.core.adapter import (
    LM_HEAD,
    OUTSIDE_LAYERS,
    AdapterHandle,
    LoraTarget,
    head_block_size,
)
from loraplex.core.errors import AdapterMismatchError
from loraplex.core.plan import PageGeometry, PageId
from loraplex.execution.dora import with_factors
from loraplex.execution.host_adapters import HostAdapter, HostWeight
from loraplex.execution.resident_parts import PartsWriter
from loraplex.kernels.adapter_parts import AdapterParts, PartsUse
from loraplex.kernels.host_memory import zeroed
from loraplex.kernels.lora import LoraBatch, LoraTable, LoraUse, lora_batch
from loraplex.memory.adapter_pages import place
from loraplex.models.base_linears import BaseLinears

AdapterRow = tuple[int, tuple[tuple[AdapterHandle, float], ...]]
"""One row of a step: its number of tokens, and its (handle, scale)s; empty is the base model."""


@dataclasses.dataclass(frozen=True, slots=True)
class BaseEnds:
    """What an adapter may change of the base beside the linear layers of its decoder layers."""

    vocab_size: int
    hidden_size: int
    ties_embeddings: bool
    linears: BaseLinears


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
        ends: BaseEnds | None = None,
    ) -> None:
        """modules: (in_features, out_features) of every linear layer that may be adapted.

        ends: None if adapters may have nothing but LoRA of these.
        """
        self._geometry = geometry
        self._pool = _pool(num_pages * geometry.page_elements, dtype, device)
        self._table = _table(num_pages, num_layers, modules)
        self._ends = ends
        self._head_table = None if ends is None else _table(num_pages, 1, _blocks(modules, ends))
        self._parts: dict[int, AdapterParts] = {}
        self._free_entries = list(range(num_pages))
        self._residents: dict[AdapterHandle, _Resident] = {}
        self._owners: dict[PageId, AdapterHandle] = {}
        self._batched_rows: tuple[AdapterRow, ...] = ()
        self._batch: LoraBatch | None = None

    @property
    def num_bytes(self) -> int:
        return self._pool.nbytes

    def holds(self, handle: AdapterHandle) -> bool:
        return handle in self._residents

    def prepare(self, host: HostAdapter) -> HostAdapter:
        """Work out what takes long, ahead of `copy`: from one other thread, beside all the rest.

        Raises AdapterMismatchError or InvalidAdapterError if the base or the pool cannot take it.
        """
        if not host.parts:
            return host
        if self._ends is None:
            target = host.parts[0].target
            raise AdapterMismatchError(
                f"the adapter has {target.part} of {target.module}; only LoRA of "
                f"{', '.join(self._table.modules)} is served here"
            )
        return with_factors(host, self._ends.linears, self._pool.device, self._pool.dtype)

    def copy(self, handle: AdapterHandle, host: HostAdapter, page_ids: Sequence[PageId]) -> None:
        """Copy an adapter into pages, any ones in any order; lora_batch may then name its handle.

        Raises AdapterMismatchError if it targets a layer, module or shape that the bank does not
        have, before anything is changed. What has more than LoRA must have been prepared.
        """
        placement = place(host.targets, self._geometry)
        assert placement.num_pages == len(set(page_ids)) == len(page_ids), "the pages it needs"
        for weight in host.weights:
            self._check(weight.target)
        self._evict(handle, page_ids)
        self._batched_rows, self._batch = (), None
        starts = {
            target: page_ids[page_index] * self._geometry.page_elements + offset
            for target, page_index, offset in placement.places
        }
        entry = self._free_entries.pop()
        self._residents[handle] = _Resident(entry, tuple(page_ids))
        self._owners.update(dict.fromkeys(page_ids, handle))
        try:
            self._write_all(entry, host, starts)
        except BaseException:
            self._evict(handle, ())
            raise

    def lora_batch(self, rows: tuple[AdapterRow, ...]) -> LoraBatch | None:
        """Group the tokens of a step by adapter; None if no row uses one.

        Row i's tokens follow row i - 1's. Every handle must be in the bank. Scale 0 is the base
        model. The same rows as in the last step give the same object.
        """
        if rows != self._batched_rows:
            uses = self._uses(rows)
            self._batch = self._with_parts(uses) if uses else None
            self._batched_rows = rows
        return self._batch

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

    def _uses(self, rows: tuple[AdapterRow, ...]) -> list[LoraUse]:
        uses, first = [], 0
        for num_tokens, adapters in rows:
            wave = 0
            for handle, scale in adapters:
                if scale != 0.0 and num_tokens > 0:
                    entry = self._residents[handle].entry
                    uses.append(LoraUse(wave, entry, first, num_tokens, scale))
                    wave += 1
            first += num_tokens
        return uses

    def _with_parts(self, uses: list[LoraUse]) -> LoraBatch:
        """The batch, and what its adapters have beside LoRA of layers."""
        batch = lora_batch(self._pool, self._table, uses)
        changed = [
            PartsUse(self._parts[group.entry], group.token_indices, group.token_scales)
            for group in batch.groups()
            if group.entry in self._parts
        ]
        if not changed:
            return batch
        has_head_lora = any(use.parts.has_head_lora for use in changed)
        head_table = self._head_table if has_head_lora else None
        return dataclasses.replace(batch, parts=tuple(changed), head_table=head_table)

    def _write_all(self, entry: int, host: HostAdapter, starts: Mapping[LoraTarget, int]) -> None:
        """starts: the element of the pool where each target begins."""
        self._table.ranks[entry] = 0
        if self._head_table is not None:
            self._head_table.ranks[entry] = 0
        for weight in host.weights:
            factor = host.factors.get((weight.target.layer, weight.target.module))
            self._write(entry, weight, starts[weight.target], factor)
        self._write_parts(entry, host, starts)

    def _write_parts(self, entry: int, host: HostAdapter, starts: Mapping[LoraTarget, int]) -> None:
        self._parts.pop(entry, None)
        has_head_lora = any(weight.target.layer == OUTSIDE_LAYERS for weight in host.weights)
        if self._ends is None or not (host.parts or has_head_lora):
            return
        ends = self._ends
        writer = PartsWriter(ends.linears, host.factors, ties_embeddings=ends.ties_embeddings)
        for part in host.parts:
            start = starts[part.target]
            writer.write(part, self._pool[start : start + part.target.num_elements])
        self._parts[entry] = writer.result(has_head_lora=has_head_lora)

    def _check(self, target: LoraTarget) -> None:
        if target.layer == OUTSIDE_LAYERS and target.module == LM_HEAD and self._ends is not None:
            self._check_head(target, self._ends)
            return
        known = dict(zip(self._table.modules, self._table.shapes, strict=True))
        num_layers = self._table.ranks.shape[1]
        shape = (target.in_features, target.out_features)
        if not 0 <= target.layer < num_layers or known.get(target.module) != shape:
            raise AdapterMismatchError(
                f"the adapter targets layer {target.layer} {target.module} {shape}; "
                f"the model has {num_layers} layers of {known} (in_features, out_features)"
            )

    def _check_head(self, target: LoraTarget, ends: BaseEnds) -> None:
        assert self._head_table is not None
        index, rest = divmod(target.first, self._head_table.shapes[0][1])
        shape = (target.in_features, target.out_features)
        if rest or index >= len(self._head_table.shapes) or self._head_table.shapes[index] != shape:
            raise AdapterMismatchError(
                f"the adapter targets lm_head {shape} from output {target.first} on; the model has "
                f"{ends.hidden_size} to {ends.vocab_size}, in blocks of "
                f"{self._head_table.shapes[0][1]}"
            )

    def _evict(self, handle: AdapterHandle, page_ids: Sequence[PageId]) -> None:
        """Forget the adapters whose pages are overwritten, and an older copy of this one."""
        gone = {self._owners[page_id] for page_id in page_ids if page_id in self._owners}
        for victim in sorted(gone | ({handle} & self._residents.keys())):
            resident = self._residents.pop(victim)
            self._free_entries.append(resident.entry)
            for page_id in resident.page_ids:
                del self._owners[page_id]

    def _write(
        self, entry: int, weight: HostWeight, start: int, factor: torch.Tensor | None
    ) -> None:
        """Write A, then B transposed, at element `start` of the pool, and note the place.

        factor: DoRA's, of each of the module's outputs: B is stored times it.
        """
        target = weight.target
        middle = start + target.rank * target.in_features
        end = middle + target.rank * target.out_features
        b = weight.b
        if factor is not None:
            own = factor[target.first : target.first + target.out_features]
            b = b.to(own.device, torch.float64) * own.unsqueeze(1)
        self._pool[start:middle].view(target.rank, target.in_features).copy_(weight.a)
        self._pool[middle:end].view(target.rank, target.out_features).copy_(b.t())
        table = self._table
        if target.layer == OUTSIDE_LAYERS:
            assert self._head_table is not None
            table = self._head_table
            cell = (entry, 0, target.first // table.shapes[0][1])
        else:
            cell = (entry, target.layer, table.modules.index(target.module))
        table.offsets[cell] = start
        table.ranks[cell] = target.rank
        table.scales[cell] = weight.scale


def _pool(num_elements: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if device.type == "cpu":
        return zeroed((num_elements,), dtype)
    return torch.zeros(num_elements, dtype=dtype, device=device)


def _table(num_entries: int, num_layers: int, modules: Mapping[str, tuple[int, int]]) -> LoraTable:
    shape = (num_entries, num_layers, len(modules))
    return LoraTable(
        modules=tuple(modules),
        shapes=tuple(modules.values()),
        offsets=np.zeros(shape, np.int64),
        ranks=np.zeros(shape, np.int32),
        scales=np.zeros(shape, np.float32),
    )


def _blocks(modules: Mapping[str, tuple[int, int]], ends: BaseEnds) -> dict[str, tuple[int, int]]:
    """lm_head in blocks of outputs, each as a module of its own."""
    size = head_block_size(modules, ends.hidden_size)
    return {
        f"{LM_HEAD}.{first}": (ends.hidden_size, min(size, ends.vocab_size - first))
        for first in range(0, ends.vocab_size, size)
    }
