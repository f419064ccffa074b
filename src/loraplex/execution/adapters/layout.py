"""Layout of an adapter's pieces in the pool, or in pinned host memory for a copy."""

import dataclasses
from collections.abc import Mapping

import torch

from loraplex.core.adapter import LoraTarget, TargetPart
from loraplex.execution.adapters.host_adapters import (
    AdapterLayout,
    HostAdapter,
    HostPart,
    HostWeight,
)
from loraplex.execution.adapters.pinned_pages import PinnedPages
from loraplex.models.base_linears import BaseLinears


def write_piece(
    adapter: HostAdapter,
    base: BaseLinears | None,
    piece: HostWeight | HostPart,
    place: torch.Tensor,
) -> None:
    """Write a piece of an adapter, rounded to the type of the place.

    base: None if the adapter has only LoRA. DoRA factors must be known. place: the target's own
    flat elements, on any device.
    """
    target, factors = piece.target, adapter.factors
    key = (target.layer, target.module)
    if isinstance(piece, HostWeight):
        # A, then B transposed; with DoRA, B times the factor of each output.
        b = piece.b
        if key in factors:
            own = _outputs(factors[key], target)
            b = b.to(own.device, torch.float64) * own.unsqueeze(1)
        middle = target.rank * target.in_features
        place[:middle].view(target.rank, target.in_features).copy_(piece.a)
        place[middle:].view(target.rank, target.out_features).copy_(b.t())
        return
    view = place.view(target.rank, target.out_features)
    match target.part:
        case TargetPart.FACTOR:
            assert base is not None
            factor = _outputs(factors[key], target) - 1
            view[0].copy_(factor)
            if target.rank == 2:
                view[1].copy_(-factor * _outputs(base.bias(*key), target))
        case TargetPart.BIAS:
            assert base is not None
            bias = _outputs(base.bias(*key), target)
            view[0].copy_(piece.values.to(bias.device, torch.float64) - bias)
        case TargetPart.SHIFT:
            view[0].copy_(piece.values.double() * piece.scale)
        case _:
            view.copy_(piece.values)


def packed(
    adapter: HostAdapter, layout: AdapterLayout, pages: PinnedPages, base: BaseLinears | None
) -> HostAdapter:
    """Return the adapter in pinned pages, its pieces without values. DoRA factors must be known.

    base: None if it has only LoRA.
    """
    placement = layout.placement
    lease = pages.take(placement.num_pages)
    pieces = pieces_of(adapter)
    for target, page_index, offset in placement.places:
        end = offset + target.num_elements
        write_piece(adapter, base, pieces[target], lease.pages[page_index][offset:end])
    nothing = torch.empty(0)
    return HostAdapter(
        adapter.digest,
        tuple(dataclasses.replace(w, a=nothing, b=nothing) for w in adapter.weights),
        tuple(dataclasses.replace(part, values=nothing) for part in adapter.parts),
        layout=layout,
        packed=lease,
    )


def pieces_of(adapter: HostAdapter) -> Mapping[LoraTarget, HostWeight | HostPart]:
    pieces: list[HostWeight | HostPart] = [*adapter.weights, *adapter.parts]
    return {piece.target: piece for piece in pieces}


def _outputs(values: torch.Tensor, target: LoraTarget) -> torch.Tensor:
    """Return the values of the target's own outputs."""
    return values[target.first : target.first + target.out_features]
