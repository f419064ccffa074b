"""Check of a staged adapter's targets against another base model.

It applies the rules of base_check to the pieces that the tensors were cut into.
"""

from collections import defaultdict
from collections.abc import Iterable

from loraplex.adapters.base_check import not_enabled
from loraplex.adapters.shapes import BaseShapes
from loraplex.core.adapter import EMBEDDING, LM_HEAD, LoraTarget, TargetPart
from loraplex.core.errors import AdapterMismatchError
from loraplex.core.rank_limits import RankLimits

_BY_OUTPUTS = (TargetPart.LORA, TargetPart.FACTOR, TargetPart.BIAS, TargetPart.SHIFT)
"""Parts that are cut along outputs; the others are cut along rows."""

_Place = tuple[int, str, int, TargetPart]


def check_targets(targets: Iterable[LoraTarget], shapes: BaseShapes, max_ranks: RankLimits) -> None:
    """Raise AdapterMismatchError or AdapterTooLargeError for an unservable target."""
    pieces: dict[_Place, list[LoraTarget]] = defaultdict(list)
    for target in targets:
        pieces[target.layer, target.module, target.expert, target.part].append(target)
        if not shapes.enables(target.module):
            raise AdapterMismatchError(not_enabled(target.module, shapes))
        where = f"{target.module} of layer {target.layer}"
        max_ranks.check(target.module, target.lora_rank or 0, where)
    for place, of_place in pieces.items():
        layer, module, expert, part = place
        found, needed = _size(part, of_place), _needed(place, of_place, shapes)
        if layer >= shapes.num_layers or found != needed:
            base = "has none" if needed is None else f"needs {list(needed)}"
            has_experts = module in shapes.layer(layer).num_experts
            of_expert = f", expert {expert}," if expert or has_experts else ""
            raise AdapterMismatchError(
                f"{part} of {module} of layer {layer}{of_expert} is {list(found)}; the base model "
                f"{base}, in {shapes.num_layers} layers"
            )


def _size(part: TargetPart, pieces: list[LoraTarget]) -> tuple[int, int]:
    """Return (in, out features) of LoRA, (number, outputs) of vectors, else (rows, columns)."""
    if part in _BY_OUTPUTS:
        num_outputs = sum(piece.out_features for piece in pieces)
        first = pieces[0]
        return (first.in_features if part is TargetPart.LORA else first.rank, num_outputs)
    return sum(piece.rank for piece in pieces), pieces[0].out_features


def _needed(place: _Place, pieces: list[LoraTarget], shapes: BaseShapes) -> tuple[int, int] | None:
    """Return the `_size` that the base needs; None if it has no such place."""
    layer, module, expert, part = place
    num_experts = shapes.layer(layer).num_experts.get(module)
    is_experts_vector = num_experts is not None and part is not TargetPart.LORA
    last = expert + max(piece.num_experts for piece in pieces) - 1
    if not 0 <= expert <= last < (num_experts or 1) or is_experts_vector:
        return None
    if layer < 0 and not shapes.adapts_ends:
        return None
    features = None
    if layer >= 0 and shapes.has_module(layer, module):
        features = shapes.layer(layer).modules[module]
    if layer < 0 and module == LM_HEAD:
        features = (shapes.hidden_size, shapes.vocab_size)
    match part:
        case TargetPart.LORA:
            return features
        case TargetPart.FACTOR | TargetPart.BIAS | TargetPart.SHIFT:
            # A factor has a second vector for the bias that it must not scale.
            has_two = part is TargetPart.FACTOR and shapes.is_biased(
                None if layer < 0 else layer, module
            )
            is_refused = has_two and module == LM_HEAD
            return None if features is None or is_refused else (2 if has_two else 1, features[1])
    is_biased = LM_HEAD in shapes.biased_modules and (module == LM_HEAD or shapes.ties_embeddings)
    is_row = part in (TargetPart.ROWS, TargetPart.TOKENS)
    if layer >= 0 or module not in (EMBEDDING, LM_HEAD) or (is_biased and is_row):
        return None
    num_rows = sum(piece.rank for piece in pieces)
    match part:
        case TargetPart.ROWS:
            return shapes.vocab_size, shapes.hidden_size
        case TargetPart.EMBEDDING_A:
            return shapes.vocab_size, pieces[0].out_features
        case _:
            return num_rows, shapes.hidden_size
