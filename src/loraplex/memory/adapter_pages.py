"""Placement of adapters in device pages: arithmetic only.

A page is a whole number of slots; a target (one adapted linear layer: A and B together) takes
whole slots of one page and never crosses into the next. An adapter's size depends on its true
ranks. The geometry follows that of TensorRT-LLM's adapter cache, whose page is just what an adapter
of the usual rank needs on every module. Ours is a whole share of that, some layers of it, so that
an adapter of fewer modules wastes little; and no page is too small for one target of the largest
rank. A layer with many experts is itself divided into pages.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from loraplex.core.adapter import LM_HEAD, LoraTarget, each_expert
from loraplex.core.errors import AdapterTooLargeError, ConfigError
from loraplex.core.plan import PageGeometry
from loraplex.core.rank_limits import RankLimits

_LARGEST_TARGETS_PER_PAGE = 2
"""Minimum, if the usual adapter is so large: less than half a page is lost after a target."""
_LARGEST_TARGETS_PER_LAYER = 8
"""A layer with experts that takes more than so many of the largest targets is divided."""
_SLOT_ALIGNMENT = 16
"""Every slot begins at a multiple of so many elements, as wide loads of accelerators need it."""
_ELEMENTS_PER_TARGET = 64
"""Minimum size of a page of a divided layer, for each linear layer of the model. An entry of the
bank's tables, of which there is one for each page, has 16 bytes for each of them: at most an
eighth of the page.
"""


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
    targets: Sequence[LoraTarget],
    *,
    usual_ranks: RankLimits,
    max_ranks: RankLimits,
    largest_target: int = 0,
) -> PageGeometry:
    """Return the page geometry for a model.

    `targets` are all linear layers that may be adapted, of all layers; their ranks do not matter.
    An adapter of `usual_ranks` on all of them fills whole pages, if its layers are alike and have
    few linear layers each; any one of them at its maximum rank fits in a page, and so does a piece
    of lm_head as large as any of them, or as largest_target: the inputs and outputs of a larger
    layer of which they are a rank's part. Raises ConfigError if there is no target or a rank is not
    positive.
    """
    _check_targets(targets, usual_ranks=usual_ranks, max_ranks=max_ranks)
    sizes = [target.in_features + target.out_features for target in targets]
    slot_elements = -(-min(sizes) // _SLOT_ALIGNMENT) * _SLOT_ALIGNMENT
    one_slot = PageGeometry(slot_elements, slots_per_page=1)
    usual_layers: Counter[int] = Counter()
    for target in _at_ranks(targets, usual_ranks):
        usual_layers[target.layer] += one_slot.slots_of(target) * target.num_experts
    largest_layer = max(one_slot.slots_of(target) for target in _at_ranks(targets, max_ranks))
    largest_end = -(-max_ranks.of(LM_HEAD) * max(*sizes, largest_target) // slot_elements)
    has_experts = any(target.num_experts > 1 for target in targets)
    num_cells = sum(target.num_experts for target in targets)
    least_of_divided = -(-_ELEMENTS_PER_TARGET * num_cells // slot_elements)
    slots_per_page = _slots_per_page(
        list(usual_layers.values()),
        max(largest_layer, largest_end),
        least_of_divided if has_experts else None,
    )
    return PageGeometry(slot_elements, slots_per_page)


def _slots_per_page(
    usual_layers: Sequence[int], largest_target: int, least_of_divided: int | None
) -> int:
    """Return the smallest whole share of the usual adapter that fits large targets.

    least_of_divided: minimum if that is a part of a layer; None: no layer is divided.
    """
    num_layers, layer = len(usual_layers), max(usual_layers)
    if least_of_divided is not None and layer > _LARGEST_TARGETS_PER_LAYER * largest_target:
        least = max(_LARGEST_TARGETS_PER_PAGE * largest_target, least_of_divided)
        return -(-layer // max(1, layer // least))
    for per_page in range(1, num_layers):
        if num_layers % per_page == 0:
            groups = range(0, num_layers, per_page)
            slots = max(sum(usual_layers[first : first + per_page]) for first in groups)
            if slots >= _LARGEST_TARGETS_PER_PAGE * largest_target:
                return slots
    return max(sum(usual_layers), largest_target)


def layer_targets(
    layers: Sequence[Mapping[str, tuple[int, int]]],
    ranks: RankLimits = RankLimits(1),  # noqa: B008 - it is frozen
    num_experts: Sequence[Mapping[str, int]] | None = None,
) -> list[LoraTarget]:
    """Return every linear layer of a model. layers: each one's (in_features, out_features).

    num_experts: of each layer, by module, of modules that have experts; None: none has.
    """
    return [
        LoraTarget(
            *(layer, module, ranks.of(module), *features), num_experts=numbers.get(module, 1)
        )
        for layer, (modules, numbers) in enumerate(
            zip(layers, num_experts or [{}] * len(layers), strict=True)
        )
        for module, features in modules.items()
    ]


def place(targets: Iterable[LoraTarget], geometry: PageGeometry) -> Placement:
    """Lay targets into pages: sorted, each after the last one or at the start of a new page.

    Raises AdapterTooLargeError if a target is larger than a page.
    """
    places: list[TargetPlace] = []
    page_index, used = 0, 0
    for target in sorted(each_expert(targets)):
        slots = geometry.slots_of(target)
        _check_slots(target, slots, geometry)
        if used + slots > geometry.slots_per_page:
            page_index, used = page_index + 1, 0
        places.append(TargetPlace(target, page_index, used * geometry.slot_elements))
        used += slots
    return Placement(tuple(places), page_index + 1 if places else 0)


def pages_of(targets: Iterable[LoraTarget], geometry: PageGeometry) -> int:
    """Return the number of pages of `place`, without the places. Raises AdapterTooLargeError."""
    num_full, used = 0, geometry.slots_per_page
    for target in sorted(targets):
        slots = geometry.slots_of(target)
        _check_slots(target, slots, geometry)
        rest = target.num_experts - (geometry.slots_per_page - used) // slots
        if rest <= 0:
            used += target.num_experts * slots
            continue
        per_page = geometry.slots_per_page // slots
        pages = -(-rest // per_page)
        num_full, used = num_full + pages, (rest - (pages - 1) * per_page) * slots
    return num_full


def most_pages(stages: Iterable[Iterable[LoraTarget]], geometry: PageGeometry) -> int:
    """Return the pages of an adapter: those that the stage needs that has the most of it.

    Raises AdapterTooLargeError.
    """
    return max(pages_of(targets, geometry) for targets in stages)


def pages_at_ranks(targets: Sequence[LoraTarget], ranks: RankLimits, geometry: PageGeometry) -> int:
    """Return the pages of an adapter of these ranks on all `targets` (as for page_geometry).

    A pool with at least so many pages can hold any one adapter of ranks up to these on any of the
    targets: with a fixed order and no back-filling, fewer or smaller targets never need more pages.
    """
    return pages_of(_at_ranks(targets, ranks), geometry)


def pages_for_bytes(num_bytes: int, geometry: PageGeometry, element_bytes: int) -> int:
    """Return the number of whole pages in num_bytes."""
    return num_bytes // (geometry.page_elements * element_bytes)


def _at_ranks(targets: Sequence[LoraTarget], ranks: RankLimits) -> list[LoraTarget]:
    of_module = {module: ranks.of(module) for module in {target.module for target in targets}}
    return [msgspec.structs.replace(target, rank=of_module[target.module]) for target in targets]


def _check_slots(target: LoraTarget, slots: int, geometry: PageGeometry) -> None:
    if slots > geometry.slots_per_page:
        raise AdapterTooLargeError(
            f"{target.module} of layer {target.layer} with rank {target.rank} takes {slots} "
            f"slots, a device page has {geometry.slots_per_page}"
        )


def _check_targets(
    targets: Sequence[LoraTarget], *, usual_ranks: RankLimits, max_ranks: RankLimits
) -> None:
    if not targets:
        raise ConfigError("no layer of the model may be adapted: at least one module is needed")
    for name, ranks in (("usual_ranks", usual_ranks), ("max_ranks", max_ranks)):
        if ranks.smallest < 1:
            raise ConfigError(f"{name} must be at least 1, got {ranks.smallest}", param=name)
