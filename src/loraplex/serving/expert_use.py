"""Which experts an adapter changes, in few words: models have hundreds of them in each layer."""

import itertools
from collections import defaultdict
from collections.abc import Iterable

import msgspec

from loraplex.core.adapter import LoraTarget
from loraplex.core.rank_limits import ModuleKind, kind_of


class ExpertUse(msgspec.Struct, frozen=True, kw_only=True):
    """Experts whose linear layers of one name an adapter changes."""

    num_adapted: int
    """Number of experts with LoRA, of all layers together."""
    layers: dict[str, str]
    """Experts by layers, both as ranges: {"0": "3,7", "1-47": "0-127"}."""


def expert_use(targets: Iterable[LoraTarget]) -> dict[str, ExpertUse]:
    """Return the use of experts by module, of those modules that have experts."""
    places: dict[str, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for target in targets:
        if kind_of(target.module) is ModuleKind.EXPERTS:
            experts = range(target.expert, target.expert + target.num_experts)
            places[target.module][target.layer] += experts
    return {
        module: ExpertUse(num_adapted=sum(map(len, experts.values())), layers=_by_layers(experts))
        for module, experts in sorted(places.items())
    }


def _by_layers(experts: dict[int, list[int]]) -> dict[str, str]:
    alike: dict[str, list[int]] = defaultdict(list)
    for layer, of_layer in sorted(experts.items()):
        alike[_ranges(of_layer)].append(layer)
    return {_ranges(layers): text for text, layers in alike.items()}


def _ranges(numbers: Iterable[int]) -> str:
    """Return numbers as text: "0-3,7"."""
    runs = itertools.groupby(enumerate(sorted(numbers)), key=lambda pair: pair[1] - pair[0])
    found = [[number for _, number in run] for _, run in runs]
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in found)
