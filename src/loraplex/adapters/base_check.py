"""Checks of an adapter against a base model: tensor shapes, values, and the base that it names.

Shapes are always compared: of tensors when they are staged, and of the targets that they were cut
into when a stored adapter meets another base. Names are compared when both sides have one; the
operator chooses whether a difference is a warning or an error.
"""

import difflib
import enum
import re
from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

from loraplex.adapters.base_kinds import another_kind, model_name
from loraplex.adapters.canonical import CanonicalRow, RowKind
from loraplex.adapters.shapes import NO_MODULE, BaseShapes
from loraplex.adapters.tensor_file import RawTensor
from loraplex.core.adapter import EMBEDDING, LM_HEAD, SCORE, LoraTarget, TargetPart
from loraplex.core.counts import counted
from loraplex.core.errors import (
    AdapterMismatchError,
    InvalidAdapterError,
    UnsupportedFeatureError,
)
from loraplex.core.rank_limits import RankLimits

_VECTOR_NORMS = ("input_layernorm", "post_attention_layernorm", "norm")
_SLOTS = {
    "a": "lora_A",
    "b": "lora_B",
    "magnitude": "lora_magnitude_vector",
    "base": "base_layer.weight",
}
_QUANTIZED = re.compile(
    r"((-unsloth)?-(bnb-[48]bit|[2-8]bit(-dwq)?|(gptq|awq|fp8)(-int[48]|-[48]bit)?)"
    r"|[-.](q[2-8]_[01k](_[sml])?|iq4_nl|mxfp4|bf16|f16|f32))$"
)
"""Endings of the names of quantised checkpoints, and of GGUF files."""
_AWQ = "awq"
_FOLDED = (
    "the base model is AWQ, which moves factors between norms and weights: an adapter that was "
    "trained on the original gives other results here; serve the original, or train on this "
    "checkpoint"
)

POOL_TYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
"""safetensors' type names by torch's."""

_ROUNDED = " are rounded to the"
_TRAINED_ON = "trained on "
_OTHER_ROUNDING = ": the same model with other rounding of its weights"
# The smallest value that rounds to infinity: half a step above the largest finite one.
_TOO_LARGE = {"F16": 65520.0, "F32": 2.0**128 - 2.0**103, "BF16": 2.0**128 - 2.0**119}
_LARGEST_ACTIVATION = 2.0**63
"""Norms square their inputs in float32, which ends at 2^128."""
_WIDER = {"F16": ("F16",), "BF16": ("BF16",), "F32": ("F32", "F16", "BF16")}


class WarningCode(enum.StrEnum):
    """Subject of a warning, for programs that act on it."""

    OTHER_BASE = "other_base"
    """The adapter was trained on another base model."""
    OTHER_ROUNDING = "other_rounding"
    """It was trained on the same base model, whose weights are rounded otherwise here."""
    OTHER = "other"


class Remarks(NamedTuple):
    """What a load found in an adapter that it does not refuse."""

    warnings: tuple[str, ...]
    """Remarks that need a decision or an action."""
    codes: tuple[WarningCode, ...]
    """Code of each warning."""
    notes: tuple[str, ...]
    """Remarks that most adapters have, and that need none."""


class BaseCheck(enum.StrEnum):
    """Consequence of an adapter that names another base model."""

    AUTO = "auto"
    """An error if the name has another architecture or size, else a warning."""
    WARN = "warn"
    ERROR = "error"


def check_base_name(
    trained_on: str | None,
    base_model: str,
    check: BaseCheck,
    stored_format: str = "",
    architecture: str = "",
) -> list[str]:
    """Return warnings, or raise AdapterMismatchError if so chosen. Unknown names match.

    stored_format: that of quantised weights of the base, such as gptq. architecture: the base's
    class, such as LlamaForCausalLM. Names that differ only in the form of the weights are never an
    error.
    """
    if trained_on and model_name(trained_on) == model_name(base_model):
        return []
    folded = [_FOLDED] if stored_format == _AWQ else []
    if not trained_on or not base_model:
        return folded
    other = other_base(trained_on, base_model, stored_format)
    if other is None:
        same = _difference(trained_on, base_model, stored_format)
        return [f"{same}{_OTHER_ROUNDING}", *folded]
    kind = another_kind(trained_on, base_model, architecture)
    if kind:
        other += f": a model {kind}"
    if check is BaseCheck.ERROR or (kind and check is BaseCheck.AUTO):
        raise AdapterMismatchError(
            f"the adapter belongs to another base model: {other}. If that name is wrong, correct "
            "it in the adapter's config; to load the adapter all the same, the operator sets "
            "adapter_base_check = warn (--adapter-base-check warn)"
        )
    return [other, *folded]


def other_base(trained_on: str | None, base_model: str, stored_format: str = "") -> str | None:
    """Return how the base that was trained differs from the served one; None if it does not."""
    if not trained_on or not base_model or _short(trained_on) == _short(base_model):
        return None
    return _difference(trained_on, base_model, stored_format)


def _difference(trained_on: str, base_model: str, stored_format: str) -> str:
    stored = f" (stored as {stored_format})" if stored_format else ""
    return f"{_TRAINED_ON}{trained_on!r}; this server runs {base_model!r}{stored}"


def check_shapes(rows: Iterable[CanonicalRow], shapes: BaseShapes, max_ranks: RankLimits) -> None:
    """Check the shape of every tensor.

    Raises AdapterMismatchError, AdapterTooLargeError or UnsupportedFeatureError with the tensor and
    the expected and actual shapes.
    """
    rows = tuple(rows)
    for row in rows:
        _check_place(row, shapes)
        for name, expected in _expected(row, shapes).items():
            _check_shape(row, name, row.tensors[name], expected, shapes.vocab_size)
        if row.kind is RowKind.LORA:
            max_ranks.check(row.module, row.tensors["a"].shape[0], row.origin)
        if row.kind is RowKind.TOKENS:
            _check_tokens(row, shapes)
        if row.kind is RowKind.BIAS and not shapes.is_biased(row.layer, row.module):
            raise AdapterMismatchError(
                f"tensor {row.origin}.bias is for a bias that the base model does not have"
            )
    _check_together(rows)
    if shapes.ties_embeddings:
        _check_tied(rows)


def check_cast(rows: Iterable[CanonicalRow], pool_dtype: str) -> list[str]:
    """Return warnings of tensors that are rounded to the pool's type.

    Raises InvalidAdapterError, with the tensor's name, if a value is too large for it.
    """
    pool = POOL_TYPES[pool_dtype]
    rounded: set[str] = set()
    for row in rows:
        for name, tensor in row.tensors.items():
            if not tensor.is_float or tensor.dtype in _WIDER[pool]:
                continue
            rounded.add(tensor.dtype)
            largest = tensor.largest_magnitude()
            if largest >= _TOO_LARGE[pool]:
                raise InvalidAdapterError(
                    f"{name} of {row.origin} ({tensor.dtype}) has values up to {largest:g}: too "
                    f"large for the {pool_dtype} that this server computes in"
                )
    return [
        f"tensors in {dtype}{_ROUNDED} {pool_dtype} that this server computes in"
        for dtype in sorted(rounded)
    ]


def check_magnitudes(rows: Iterable[CanonicalRow], pool_dtype: str) -> None:
    """Raise InvalidAdapterError for a row that makes numbers which no later step computes with."""
    limit = min(_TOO_LARGE[POOL_TYPES[pool_dtype]], _LARGEST_ACTIVATION)
    for row in rows:
        peaks = {
            name: tensor.largest_magnitude() * (1.0 if name == "b" else abs(row.scale))
            for name, tensor in row.tensors.items()
            if tensor.is_float
        }
        # x A^T is multiplied by the scale in float32, before B.
        inner = peaks.pop("a", 0.0)
        largest = max(inner * peaks.pop("b", 0.0), *peaks.values(), 0.0)
        if inner >= _LARGEST_ACTIVATION or not largest < limit:
            raise InvalidAdapterError(
                f"{row.origin} (scale {row.scale:g}) makes up to {max(inner, largest):g} of an "
                f"input of 1; this server computes in {pool_dtype}, with less than {limit:g}"
            )


def is_about_rounding(warning: str) -> bool:
    """Whether a warning is one of check_cast's, which most adapters have."""
    return _ROUNDED in warning


def divided(remarks: Iterable[str]) -> Remarks:
    """Divide the warnings of a staged adapter into those that need an action and notes."""
    given = tuple(remarks)
    warnings = tuple(remark for remark in given if not is_about_rounding(remark))
    return Remarks(
        warnings=warnings,
        codes=tuple(map(_code, warnings)),
        notes=tuple(filter(is_about_rounding, given)),
    )


def _code(warning: str) -> WarningCode:
    """Return the code of a warning. Stored adapters have the words alone."""
    if not warning.startswith(_TRAINED_ON):
        return WarningCode.OTHER
    is_same = warning.endswith(_OTHER_ROUNDING)
    return WarningCode.OTHER_ROUNDING if is_same else WarningCode.OTHER_BASE


def _check_place(row: CanonicalRow, shapes: BaseShapes) -> None:
    name = "a" if "a" in row.tensors else next(iter(row.tensors), "")
    what = f"tensor {row.origin}.{_SLOTS.get(name, name)}"
    if row.layer is not None and not 0 <= row.layer < shapes.num_layers:
        raise AdapterMismatchError(
            f"{what} belongs to layer {row.layer}; the base model has {shapes.num_layers} layers"
        )
    if not shapes.enables(row.module):
        raise AdapterMismatchError(f"{what}: {not_enabled(row.module, shapes)}")
    is_linear = row.layer is not None and row.module in shapes.modules
    _check_expert(row, shapes, what)
    if row.layer is not None and is_linear and not shapes.has_module(row.layer, row.module):
        layers = shapes.module_layers[row.module]
        raise AdapterMismatchError(
            f"{what}: layer {row.layer} of the base model has no {row.module}; "
            f"{counted(len(layers), 'layer has', 'layers have')} one, from {layers[0]} to "
            f"{layers[-1]}"
        )
    is_end = row.layer is None and row.module in (EMBEDDING, LM_HEAD)
    is_norm = row.module in _VECTOR_NORMS and (row.layer is None) == (row.module == "norm")
    if shapes.vocab_size == 0:
        if is_end or is_norm or row.kind is not RowKind.LORA or "bias" in row.tensors:
            raise UnsupportedFeatureError(
                f"{what}: only LoRA of {', '.join(shapes.modules)} is served here"
            )
    elif row.layer is None and row.module == SCORE:
        _check_score(row, what)
        return
    elif (is_norm or is_linear) and row.kind is RowKind.FULL:
        raise UnsupportedFeatureError(
            f"{what} is a whole copy of {row.module}; only copies of {EMBEDDING} and {LM_HEAD} "
            "are served"
        )
    elif is_end:
        _check_end(row, shapes, what)
        return
    if row.layer is None or not (
        is_linear and shapes.names_module(row.origin, row.layer, row.module)
    ):
        raise AdapterMismatchError(
            f"{what} belongs to module {row.module!r}; the base model can be adapted in "
            f"{', '.join(shapes.modules)}{_nearest(row, shapes)}"
        )


def _check_expert(row: CanonicalRow, shapes: BaseShapes, what: str) -> None:
    num_experts = None if row.layer is None else shapes.layer(row.layer).num_experts.get(row.module)
    if row.expert is not None and not 0 <= row.expert < (num_experts or 0):
        has = "no experts" if num_experts is None else f"{num_experts} experts"
        raise AdapterMismatchError(
            f"{what} belongs to expert {row.expert} of {row.module}; the base model has {has} there"
        )
    if num_experts is None:
        return
    if row.expert is None:
        raise AdapterMismatchError(
            f"{what} names no expert; the base model has {num_experts} in each {row.module}"
        )
    if row.kind is not RowKind.LORA or "bias" in row.tensors:
        raise UnsupportedFeatureError(
            f"{what}: only LoRA of experts is served, without DoRA, biases, lora_bias and copies"
        )


def _check_score(row: CanonicalRow, what: str) -> None:
    """Refuse what is no whole weight of a classification head: base_copies made one of LoRA."""
    if row.kind is not RowKind.FULL:
        raise UnsupportedFeatureError(
            f"{what}: only a whole copy of a classification head and plain LoRA of it are served, "
            "without DoRA, biases and lora_bias"
        )


def _check_end(row: CanonicalRow, shapes: BaseShapes, what: str) -> None:
    if not shapes.adapts_ends:
        raise UnsupportedFeatureError(
            f"{what}: the embedding and the output layer of this base model cannot be adapted"
        )
    is_of_head = row.module == LM_HEAD or shapes.ties_embeddings
    if is_of_head and LM_HEAD in shapes.biased_modules and row.kind is not RowKind.LORA:
        raise UnsupportedFeatureError(
            f"{what}: the base model's {LM_HEAD} has a bias; only LoRA of it is served, without "
            "DoRA, copies and trained tokens"
        )


def _nearest(row: CanonicalRow, shapes: BaseShapes) -> str:
    """Return the base's names that are most like the row's, for an error."""
    own = {} if row.layer is None else shapes.layer(row.layer).paths
    paths = [path.format(row.layer, expert=row.expert or 0) for path in own.values()]
    names = difflib.get_close_matches(row.origin, paths, cutoff=0.8)
    return f"; the nearest: {', '.join(names)}" if names else ""


def not_enabled(module: str, shapes: BaseShapes) -> str:
    """Return why no adapter may change a module, in words that TensorRT-LLM's clients look for."""
    enabled = ", ".join(shapes.enabled_modules or ()) or NO_MODULE
    return f"lora module {module} not enabled for this model, which can be adapted in {enabled}"


def _expected(row: CanonicalRow, shapes: BaseShapes) -> dict[str, tuple[int, ...]]:
    """Return the shapes that the base model needs."""
    if row.layer is None and row.module == SCORE:
        return {name: (tensor.shape[0], shapes.score_size) for name, tensor in row.tensors.items()}
    ends = {
        EMBEDDING: (shapes.vocab_size, shapes.hidden_size),
        LM_HEAD: (shapes.hidden_size, shapes.vocab_size),
    }
    own = {} if row.layer is None else shapes.layer(row.layer).modules
    in_features, out_features = own.get(row.module) or ends[row.module]
    match row.kind:
        case RowKind.LORA:
            rank = row.tensors["a"].shape[0]
            expected = {"a": (rank, in_features), "b": (out_features, rank)}
            return expected | ({"bias": (out_features,)} if "bias" in row.tensors else {})
        case RowKind.FULL:
            return dict.fromkeys(row.tensors, (shapes.vocab_size, shapes.hidden_size))
        case RowKind.TOKENS:
            rows = row.tensors["indices"].shape[0]
            return {"weight": (rows, shapes.hidden_size)}
        case _:
            return dict.fromkeys(row.tensors, (out_features,))


def _check_shape(
    row: CanonicalRow, name: str, tensor: RawTensor, expected: tuple[int, ...], vocab_size: int
) -> None:
    if tensor.shape == expected:
        return
    text = (
        f"tensor {row.origin}.{_SLOTS.get(name, name)} has shape {list(tensor.shape)}; the base "
        f"model needs {list(expected)}"
    )
    differing = [
        (size, own) for size, own in zip(tensor.shape, expected, strict=False) if size != own
    ]
    is_end = row.layer is None and row.module in (EMBEDDING, LM_HEAD)
    if is_end and len(differing) == 1 and differing[0][1] == vocab_size:
        text += (
            f": the vocabulary was resized to {differing[0][0]} tokens, and this server has the "
            f"base model's {vocab_size}: others need a tokenizer of their own. Resize the base "
            "model and serve that, or train again without resizing"
        )
    raise AdapterMismatchError(text)


def _check_tokens(row: CanonicalRow, shapes: BaseShapes) -> None:
    largest = int(row.tensors["indices"].integers().max())
    if largest >= shapes.vocab_size:
        raise AdapterMismatchError(
            f"{row.origin} has trained rows for token {largest}; the base model has "
            f"{shapes.vocab_size} tokens"
        )


def _check_together(rows: tuple[CanonicalRow, ...]) -> None:
    """Refuse kinds of rows whose combination is not served."""
    kinds: dict[tuple[int | None, str], dict[RowKind, CanonicalRow]] = {}
    for row in rows:
        kinds.setdefault((row.layer, row.module), {})[row.kind] = row
    for of_module in kinds.values():
        tokens = of_module.get(RowKind.TOKENS)
        if tokens is not None and len(of_module) > 1:
            raise UnsupportedFeatureError(
                f"tensor {tokens.origin}.trainable_tokens_delta together with other changes of "
                f"{tokens.module} is not served"
            )


def _check_tied(rows: tuple[CanonicalRow, ...]) -> None:
    """Refuse two different copies of the one parameter of a tied base."""
    copies = [row for row in rows if row.kind is RowKind.FULL and "base" in row.tensors]
    if len(copies) == 2 and copies[0].tensors["base"].data != copies[1].tensors["base"].data:
        first, second = (f"{row.origin}.{_SLOTS['base']}" for row in copies)
        raise AdapterMismatchError(
            f"tensors {first} and {second} differ; in the base model they are one, since lm_head "
            "is tied to the token embedding"
        )


def _short(model: str) -> str:
    """Return the name without the suffix of a quantised base."""
    return _QUANTIZED.sub("", model_name(model))


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
        if layer < 0 and module == SCORE and part is TargetPart.ROWS:
            needed = (found[0], shapes.score_size)  # each head has its own number of labels
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
