"""Composition of several adapters in one request, and the combinations that are refused.

With t_i the request's scales and W_i a weight W of the base with adapter i merged into it, the
request uses W + sum t_i (W_i - W): for LoRA that is the concatenation of the ranks, and it is also
defined for biases, DoRA and one whole copy. The order of the adapters has no meaning.
"""

import itertools
import math
from collections.abc import Sequence

from loraplex.adapters.shapes import BaseShapes
from loraplex.adapters.store import AdapterVersion
from loraplex.core.adapter import EMBEDDING, LM_HEAD, OUTSIDE_LAYERS, TargetPart
from loraplex.core.errors import UnsupportedFeatureError

Composition = list[tuple[AdapterVersion, float]]
"""Versions and the scale of each."""

_Place = tuple[int, str]
"""Layer and module."""

_REPLACING = frozenset({TargetPart.ROWS, TargetPart.TOKENS})


def compose(chosen: Composition, shapes: BaseShapes) -> Composition:
    """Return the composition in the one order that identifies its KV cache.

    Each digest occurs once, with the sum of its scales, in ascending order; scale 0 is left out.
    Raises UnsupportedFeatureError if one adapter replaces what another one changes.
    """
    scales: dict[str, list[float]] = {}
    versions: dict[str, AdapterVersion] = {}
    for version, scale in chosen:
        versions.setdefault(version.digest, version)
        scales.setdefault(version.digest, []).append(scale)
    # fsum: with it the sum does not depend on the order either.
    sums = {digest: math.fsum(scales[digest]) for digest in sorted(scales)}
    composition = [(versions[digest], scale) for digest, scale in sums.items() if scale != 0.0]
    _check_replaced([version for version, _ in composition], shapes)
    return composition


def _check_replaced(versions: Sequence[AdapterVersion], shapes: BaseShapes) -> None:
    """Refuse two adapters of which one replaces what the other changes: the last would win."""
    for version, other in itertools.permutations(versions, 2):
        contested = _replaced(version, shapes) & _changed(other)
        if contested:
            _, module = min(contested)
            raise UnsupportedFeatureError(
                f"adapters {version.name!r} and {other.name!r} cannot be composed: the first "
                f"replaces rows of {module}, which the other changes too; use one of them, or "
                f"adapters that leave {module} alone",
                param="adapters",
            )


def _replaced(version: AdapterVersion, shapes: BaseShapes) -> set[_Place]:
    """Return where an adapter replaces rows, including tied parameters."""
    places = {
        (target.layer, target.module)
        for target in version.source.targets
        if target.part in _REPLACING
    }
    if shapes.ties_embeddings and places:
        places |= {(OUTSIDE_LAYERS, EMBEDDING), (OUTSIDE_LAYERS, LM_HEAD)}
    return places


def _changed(version: AdapterVersion) -> set[_Place]:
    return {(target.layer, target.module) for target in version.source.targets}
