"""Placement of adapters in device pages: arithmetic only.

A page is a whole number of slots; a target (one adapted linear layer: A and B together) takes
whole slots of one page and never crosses into the next. An adapter's size depends on its true
ranks. The geometry follows that of TensorRT-LLM's adapter cache, whose page is just what an adapter
of the usual rank needs on every module. Ours is a whole share of that, some layers of it, so that
an adapter of fewer modules wastes little; and no page is too small for one target of the largest
rank.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import msgspec

from loraplex.core.adapter import LoraTarget
from loraplex.core.errors import AdapterTooLargeError, ConfigError
from loraplex.core.plan import PageGeometry

_LARGEST_TARGETS_PER_PAGE = 2
"""Minimum, if the usual adapter is so large: less than half a page is lost after a target."""


class TargetPlace(NamedTuple):
    """Place of one target."""

    target: LoraTarget
    page_index: int
    """Index in the adapter's own pages, AdapterCopy.page_ids."""
    offset: int
    """Offset in elements from the start of the page."""


class Placement(NamedTuple):
    places: tuple[TargetPlace, ...]
    """Places sorted by target: layer, then module."""
    num_pages: int


def page_geometry(
    targets: Sequence[LoraTarget], *, optimal_rank: int, max_rank: int
) -> PageGeometry:
    """Return the page geometry for a model.

    `targets` are all linear layers that may be adapted, of all layers; their ranks do not matter.
    An adapter of `optimal_rank` on all of them fills whole pages, if its layers are alike; any one
    of them at `max_rank` fits in a page. Raises ConfigError if there is no target or a rank is not
    positive.
    """
    _check_targets(targets, optimal_rank=optimal_rank, max_rank=max_rank)
    one_slot = PageGeometry(
        slot_elements=min(target.in_features + target.out_features for target in targets),
        slots_per_page=1,
    )
    usual_layers: Counter[int] = Counter()
    for target in _at_rank(targets, optimal_rank):
        usual_layers[target.layer] += one_slot.slots_of(target)
    largest_target = max(one_slot.slots_of(target) for target in _at_rank(targets, max_rank))
    return PageGeometry(
        one_slot.slot_elements, _slots_per_page(list(usual_layers.values()), largest_target)
    )


def _slots_per_page(usual_layers: Sequence[int], largest_target: int) -> int:
    """Return the smallest whole share of the usual adapter that fits large targets."""
    num_layers = len(usual_layers)
    for per_page in range(1, num_layers):
        if num_layers % per_page == 0:
            groups = range(0, num_layers, per_page)
            slots = max(sum(usual_layers[first : first + per_page]) for first in groups)
            if slots >= _LARGEST_TARGETS_PER_PAGE * largest_target:
                return slots
    return max(sum(usual_layers), largest_target)


def layer_targets(
    layers: Sequence[Mapping[str, tuple[int, int]]],
    rank: int = 1,
    num_experts: Mapping[str, int] = MappingProxyType({}),
) -> list[LoraTarget]:
    """Return every linear layer of a model. layers: each one's (in_features, out_features).

    num_experts: by module, of modules that have experts.
    """
    return [
        LoraTarget(layer, module, rank, in_features, out_features, expert=expert)
        for layer, modules in enumerate(layers)
        for module, (in_features, out_features) in modules.items()
        for expert in range(num_experts.get(module, 1))
    ]


def place(targets: Sequence[LoraTarget], geometry: PageGeometry) -> Placement:
    """Lay targets into pages: sorted, each after the last one or at the start of a new page.

    Raises AdapterTooLargeError if a target is larger than a page.
    """
    places: list[TargetPlace] = []
    page_index, used = 0, 0
    for target in sorted(targets):
        slots = geometry.slots_of(target)
        if slots > geometry.slots_per_page:
            raise AdapterTooLargeError(
                f"{target.module} of layer {target.layer} with rank {target.rank} takes {slots} "
                f"slots, a device page has {geometry.slots_per_page}"
            )
        if used + slots > geometry.slots_per_page:
            page_index, used = page_index + 1, 0
        places.append(TargetPlace(target, page_index, used * geometry.slot_elements))
        used += slots
    return Placement(tuple(places), page_index + 1 if places else 0)


def pages_at_rank(targets: Sequence[LoraTarget], rank: int, geometry: PageGeometry) -> int:
    """Return the pages of an adapter of this rank on all `targets` (as for page_geometry).

    A pool with at least so many pages can hold any one adapter of ranks up to this on any of the
    targets: with a fixed order and no back-filling, fewer or smaller targets never need more pages.
    """
    return place(_at_rank(targets, rank), geometry).num_pages


def pages_for_bytes(num_bytes: int, geometry: PageGeometry, element_bytes: int) -> int:
    """Return the number of whole pages in num_bytes."""
    return num_bytes // (geometry.page_elements * element_bytes)


def _at_rank(targets: Sequence[LoraTarget], rank: int) -> list[LoraTarget]:
    return [msgspec.structs.replace(target, rank=rank) for target in targets]


def _check_targets(targets: Sequence[LoraTarget], *, optimal_rank: int, max_rank: int) -> None:
    if not targets:
        raise ConfigError("no layer of the model may be adapted: at least one module is needed")
    for name, rank in (("optimal_rank", optimal_rank), ("max_rank", max_rank)):
        if rank < 1:
            raise ConfigError(f"{name} must be at least 1, got {rank}", param=name)
