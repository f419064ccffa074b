"""Lays adapters out in pinned host memory as they will lie in the pool: a copy is whole pages."""

import dataclasses

import torch

from loraplex.core.plan import PageGeometry
from loraplex.execution.adapters.host_adapters import HostAdapter
from loraplex.execution.adapters.layout import PieceWriter, pieces_of
from loraplex.execution.adapters.pinned_pages import PinnedPages
from loraplex.memory.adapter_pages import place
from loraplex.models.base_linears import BaseLinears


def packed(
    adapter: HostAdapter, geometry: PageGeometry, pages: PinnedPages, base: BaseLinears | None
) -> HostAdapter:
    """The adapter in pages, and its pieces without values. DoRA's factors must be known.

    base: None if it has nothing but LoRA. Raises AdapterTooLargeError if a piece is larger than a
    page.
    """
    placement = place(adapter.targets, geometry)
    lease = pages.take(placement.num_pages)
    writer, pieces = PieceWriter(adapter, base), pieces_of(adapter)
    for target, page_index, offset in placement.places:
        end = offset + target.num_elements
        writer.write(pieces[target], lease.pages[page_index][offset:end])
    nothing = torch.empty(0)
    return HostAdapter(
        adapter.digest,
        tuple(dataclasses.replace(w, a=nothing, b=nothing) for w in adapter.weights),
        tuple(dataclasses.replace(part, values=nothing) for part in adapter.parts),
        packed=lease,
    )
