"""Bank of the adapters on the device: one preallocated pool of pages, and tables of its contents.

The adapter cache (memory) decides which adapter gets which pages; memory.adapter_pages has the
arithmetic inside them, which both share.
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

from loraplex.core.adapter import OUTSIDE_LAYERS, AdapterHandle
from loraplex.core.errors import AdapterMismatchError
from loraplex.core.plan import VECTORS, PageGeometry, PageId
from loraplex.execution.adapters.dora import with_factors
from loraplex.execution.adapters.entry_tables import EntryTables
from loraplex.execution.adapters.host_adapters import AdapterLayout, HostAdapter
from loraplex.execution.adapters.layout import packed, pieces_of, write_piece
from loraplex.execution.adapters.resident_parts import PartsViews
from loraplex.execution.adapters.transfers import Transfers
from loraplex.kernels.accelerator import Accelerator
from loraplex.kernels.adapter_parts import AdapterParts, PartsUse
from loraplex.kernels.host_tensors import zeroed
from loraplex.kernels.lora import (
    Arrivals,
    LoraBatch,
    LoraUse,
    ModuleShapes,
    lora_batch,
    lora_segments,
)
from loraplex.memory.adapter_pages import Placement, TargetPlace, place
from loraplex.models.base_linears import BaseLinears

AdapterRow = tuple[int, tuple[tuple[AdapterHandle, float], ...]]
"""Row of a step: its number of tokens and its (handle, scale) pairs; none for the base model."""


@dataclasses.dataclass(frozen=True, slots=True)
class BaseEnds:
    """Parts of the base that an adapter may change besides linear layers of decoder layers."""

    head: ModuleShapes
    """lm_head in blocks: entry_tables.head_modules of the whole model."""
    ties_embeddings: bool
    linears: BaseLinears


@dataclasses.dataclass(frozen=True, slots=True)
class _Resident:
    entry: int
    page_ids: tuple[PageId, ...]


class AdapterBank:
    """Owns the pool tensor [num_pages * page_elements] and the tables.

    An adapter is placed by its true rank, never padded. A copy takes its pages from their owner,
    which is forgotten: the cache reassigns only pages that no launched plan needs. Invariant: each
    page belongs to at most one adapter.

    With an accelerator adapters are laid out in pinned memory by `prepare` and copied parallel
    to the steps; steps wait on the device for the layers that they need (transfers).
    """

    def __init__(
        self,
        geometry: PageGeometry,
        num_pages: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        layers: Sequence[ModuleShapes],
        num_experts: Sequence[Mapping[str, int]] | None = None,
        ends: BaseEnds | None = None,
        max_rank: int = 256,
        accelerator: Accelerator | None = None,
        is_alone: bool = True,
    ) -> None:
        """layers: the linear layers of each decoder layer that may be adapted. num_experts: as
        LoraCells has it.

        ends: None if adapters may have only LoRA of these. max_rank: maximum rank of an
        accelerator's kernels. accelerator: that of the device; None if copies are immediate.
        is_alone: False: there are other ranks. All of them repeat a recorded step, or none, so
        steps wait for no copy: an adapter has arrived when all of it has.
        """
        self._geometry = geometry
        self._pool = _pool(num_pages * geometry.page_elements, dtype, device, accelerator)
        self._ends = ends
        self._tables = EntryTables(
            num_pages,
            layers,
            None if ends is None else ends.head,
            num_experts=num_experts,
            alignment=geometry.slot_elements,
            max_rank=max_rank,
            accelerator=accelerator,
        )
        self._transfers = None
        if accelerator is not None:
            self._transfers = Transfers(accelerator, geometry, self._pool, is_alone=is_alone)
        self._views: dict[int, tuple[PartsViews, bool]] = {}
        """Views by entry, of adapters with more than LoRA of layers; whether lm_head has LoRA."""
        self._parts: dict[int, AdapterParts] = {}
        """Parts by entry, made of the views at their first use."""
        self._free_entries = list(range(num_pages))
        self._residents: dict[AdapterHandle, _Resident] = {}
        self._owners: dict[PageId, AdapterHandle] = {}
        self._copied: list[AdapterHandle] = []
        """Copies that `arrived` returns next, without an accelerator."""
        self._batched_rows: tuple[AdapterRow, ...] = ()
        self._batch: LoraBatch | None = None

    @property
    def num_bytes(self) -> int:
        return self._pool.nbytes

    def holds(self, handle: AdapterHandle) -> bool:
        """Whether the bank has an adapter, from `copy` on, even before it has arrived."""
        return handle in self._residents

    def prepare(self, host: HostAdapter) -> HostAdapter:
        """Do the slow work ahead of `copy`; one other thread may call this at any time.

        Raises AdapterMismatchError or InvalidAdapterError if the base or the pool cannot take it.
        """
        if host.parts:
            host = self._with_factors(host)
        layout = self._layout_of(host)
        if self._transfers is None:
            return dataclasses.replace(host, layout=layout)
        return packed(host, layout, self._transfers.pages, self._base)

    def copy(self, handle: AdapterHandle, host: HostAdapter, page_ids: Sequence[PageId]) -> None:
        """Copy an adapter into any pages in any order; lora_batch may then name its handle.

        On an accelerator this only begins the copy, and `host` may be dropped. Raises
        AdapterMismatchError if it targets a layer, module or shape that the bank does not have,
        before anything is changed. Adapters with more than LoRA, and all adapters of an
        accelerator, must have been prepared.
        """
        layout = host.layout or self._layout_of(host)
        # A stage of a pipeline has some layers of the adapter, and pages for all.
        needed = layout.placement.num_pages
        assert needed <= len(set(page_ids)) == len(page_ids), "the pages it needs"
        self._evict(handle, page_ids)
        self._batched_rows, self._batch = (), None
        entry = self._free_entries.pop()
        self._residents[handle] = _Resident(entry, tuple(page_ids))
        self._owners.update(dict.fromkeys(page_ids, handle))
        try:
            self._fill(handle, host, layout)
        except BaseException:
            self._evict(handle, ())
            raise

    def arrived(self, *, wait: bool = False) -> tuple[AdapterHandle, ...]:
        """Return the copies that may be used, each once: their first layers have arrived, or all.

        wait: wait for one, if any is in flight. The caller must keep the result: if its step
        fails, it is lost.
        """
        if self._transfers is not None:
            return self._transfers.copies.begun(wait=wait)
        copied = tuple(handle for handle in self._copied if self.holds(handle))
        self._copied.clear()
        return tuple(dict.fromkeys(copied))

    def lora_batch(self, rows: tuple[AdapterRow, ...]) -> LoraBatch | None:
        """Group the tokens of a step by adapter; None if no row uses one.

        Row i's tokens follow row i - 1's. Every handle must be in the bank. Scale 0 is the base
        model. The same rows as in the last step return the same object, once all their adapters
        have arrived. Valid until the next call.
        """
        if rows != self._batched_rows or (self._batch and self._batch.arrivals):
            uses = self._uses(rows)
            num_tokens = sum(num_tokens for num_tokens, _ in rows)
            self._batch = self._batch_of(uses, num_tokens, self._arrivals(rows)) if uses else None
            self._batched_rows = rows
        return self._batch

    def blank_batch(self, num_tokens: int) -> LoraBatch | None:
        """Return one wave in which no adapter applies; None if the bank has no page.

        It has the form of any plain batch of one wave for `num_tokens`. For an accelerator.
        """
        if not self._free_entries and not self._residents:
            return None
        self._batched_rows, self._batch = (), None
        batch = lora_batch(self._pool, self._tables.layers, (), torch.device("cpu"))
        one_wave = dataclasses.replace(batch, wave_starts=np.zeros(2, np.int64))
        return self._on_device(one_wave, num_tokens)

    def check(self) -> None:
        """Assert that nothing is lost and nothing is counted twice."""
        entries = [resident.entry for resident in self._residents.values()]
        assert sorted(entries + self._free_entries) == list(range(self._tables.num_entries))
        owned = {
            page_id: handle
            for handle, resident in self._residents.items()
            for page_id in resident.page_ids
        }
        assert owned == self._owners
        assert sum(len(r.page_ids) for r in self._residents.values()) == len(owned)

    @property
    def _base(self) -> BaseLinears | None:
        return None if self._ends is None else self._ends.linears

    def _with_factors(self, host: HostAdapter) -> HostAdapter:
        if self._ends is None:
            target = host.parts[0].target
            served = itertools.chain.from_iterable(self._tables.layers.cells.layers)
            raise AdapterMismatchError(
                f"the adapter has {target.part} of {target.module}; only LoRA of "
                f"{', '.join(dict.fromkeys(served))} is served here"
            )
        return with_factors(host, self._ends.linears, self._pool.device, self._pool.dtype)

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

    def _arrivals(self, rows: tuple[AdapterRow, ...]) -> Arrivals | None:
        if self._transfers is None:
            return None
        handles = {handle for _, adapters in rows for handle, _ in adapters}
        return self._transfers.copies.outstanding(sorted(handles))

    def _batch_of(
        self, uses: list[LoraUse], num_tokens: int, arrivals: Arrivals | None
    ) -> LoraBatch:
        """Return the batch with what its adapters have besides LoRA of layers."""
        if self._transfers is None:
            batch = lora_batch(self._pool, self._tables.layers, uses)
        else:
            batch = lora_batch(self._pool, self._tables.layers, uses, torch.device("cpu"))
            batch = dataclasses.replace(self._on_device(batch, num_tokens), arrivals=arrivals)
        changed = [
            PartsUse(self._parts_of(group.entry, arrivals), group.token_indices, group.token_scales)
            for group in batch.groups()
            if group.entry in self._views
        ]
        batch = dataclasses.replace(batch, has_vectors=self._tables.have_vectors(batch.entries))
        if not changed:
            return batch
        has_head_lora = any(use.parts.has_head_lora for use in changed)
        head_table = self._tables.head if has_head_lora else None
        return dataclasses.replace(batch, parts=tuple(changed), head_table=head_table)

    def _on_device(self, batch: LoraBatch, num_tokens: int) -> LoraBatch:
        """Return the batch with its segments and token arrays on the device."""
        assert self._transfers is not None
        segments = self._transfers.segments.send(lora_segments(batch, num_tokens))
        num_indices = len(batch.token_indices)
        return dataclasses.replace(
            batch,
            segments=segments,
            token_indices=segments.token_indices[:num_indices],
            token_scales=segments.token_scales[:num_indices],
        )

    def _parts_of(self, entry: int, arrivals: Arrivals | None) -> AdapterParts:
        """Return the parts of an entry. Token rows are sorted at their first use, once arrived."""
        if entry not in self._parts:
            views, has_head_lora = self._views[entry]
            if self._transfers is None:
                self._parts[entry] = views.result(has_head_lora=has_head_lora)
            else:
                with self._transfers.accelerator.compute():
                    if arrivals is not None:
                        arrivals.wait_for(OUTSIDE_LAYERS)
                    self._parts[entry] = views.result(has_head_lora=has_head_lora)
        return self._parts[entry]

    def _layout_of(self, host: HostAdapter) -> AdapterLayout:
        return self._tables.layout_of(host, place(pieces_of(host), self._geometry))

    def _fill(self, handle: AdapterHandle, host: HostAdapter, layout: AdapterLayout) -> None:
        """Fill the adapter's pages and its entry."""
        entry, page_ids = self._residents[handle].entry, self._residents[handle].page_ids
        self._tables.clear(entry)
        if self._transfers is None:
            pieces = pieces_of(host)
            for spot in layout.placement.places:
                place_of = self._elements(page_ids, spot)
                write_piece(host, self._base, pieces[spot.target], place_of)
            self._copied.append(handle)
        else:
            assert host.packed is not None, "it was prepared"
            self._transfers.copies.start(handle, host.packed, layout.placement, page_ids)
        page_starts = np.array(page_ids, np.int64) * self._geometry.page_elements
        self._tables.write(entry, layout, page_starts)
        self._note_parts(handle, host, layout.placement, page_starts)
        self._tables.send(entry)

    def _note_parts(
        self,
        handle: AdapterHandle,
        host: HostAdapter,
        placement: Placement,
        page_starts: npt.NDArray[np.int64],
    ) -> None:
        """Note what the adapter has besides LoRA: vectors in the table if it is read on the device,
        other parts as views.
        """
        entry, page_ids = self._residents[handle].entry, self._residents[handle].page_ids
        self._parts.pop(entry, None)
        self._views.pop(entry, None)
        has_head_lora = any(weight.target.layer == OUTSIDE_LAYERS for weight in host.weights)
        if self._ends is None or not (host.parts or has_head_lora):
            return
        views = PartsViews(ties_embeddings=self._ends.ties_embeddings)
        spots = {spot.target: spot for spot in placement.places}
        written = self._tables.write_vectors(
            entry,
            [
                (
                    part.target,
                    int(page_starts[spots[part.target].page_index]) + spots[part.target].offset,
                )
                for part in host.parts
                if part.target.part in VECTORS
            ],
        )
        others = [p for p in host.parts if (p.target.layer, p.target.module) not in written]
        for part in others:
            views.add(part, self._elements(page_ids, spots[part.target]))
        if others or has_head_lora:
            self._views[entry] = views, has_head_lora

    def _elements(self, page_ids: Sequence[PageId], spot: TargetPlace) -> torch.Tensor:
        """Return a target's elements of the pool. page_ids: the adapter's pages."""
        start = page_ids[spot.page_index] * self._geometry.page_elements + spot.offset
        return self._pool[start : start + spot.target.num_elements]

    def _evict(self, handle: AdapterHandle, page_ids: Sequence[PageId]) -> None:
        """Forget the adapters whose pages are overwritten, and an older copy of this one."""
        gone = {self._owners[page_id] for page_id in page_ids if page_id in self._owners}
        for victim in sorted(gone | ({handle} & self._residents.keys())):
            resident = self._residents.pop(victim)
            self._free_entries.append(resident.entry)
            for page_id in resident.page_ids:
                del self._owners[page_id]
            if self._transfers is not None:
                self._transfers.copies.forget(victim)


def _pool(
    num_elements: int, dtype: torch.dtype, device: torch.device, accelerator: Accelerator | None
) -> torch.Tensor:
    if device.type == "cpu":
        return zeroed((num_elements,), dtype)
    if accelerator is None:
        return torch.zeros(num_elements, dtype=dtype, device=device)
    with accelerator.compute():
        pool = torch.zeros(num_elements, dtype=dtype, device=device)
    # The copies would not wait for it.
    accelerator.synchronize()
    return pool
