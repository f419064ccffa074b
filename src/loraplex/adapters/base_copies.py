"""Whole copies of the base's own parameters that an adapter contains.

PEFT saves embed_tokens and lm_head in addition to their LoRA, and with any change if the vocabulary
was resized, though they were not trained; it loads them over the base's own. A copy is left out if
all its values equal those of the base's checkpoint. One that stays is joined with what else changes
the module. LoRA of the base's classification head becomes a copy, as other heads are.
"""

import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from loraplex.adapters.canonical import CanonicalRow, RowKind, sort_rows
from loraplex.adapters.formats.peft_names import parameter_path
from loraplex.adapters.shapes import BaseShapes
from loraplex.adapters.tensor_file import RawTensor, read_pieces, tensor_names
from loraplex.core.adapter import EMBEDDING, LM_HEAD, SCORE
from loraplex.core.errors import AdapterMismatchError, LoraplexError, UnsupportedFeatureError
from loraplex.core.module_names import without_wrappers

_CHECKPOINT = "model.safetensors"
_BUILT = "rank0.safetensors"
"""Weights file of a folder that `loraplex compat build` wrote."""
_INDEX = f"{_CHECKPOINT}.index.json"
_PIECE_BYTES = 8 << 20
_TWINS = {EMBEDDING: LM_HEAD, LM_HEAD: EMBEDDING}

_Ends = dict[tuple[str, RowKind], CanonicalRow]


def without_base_copies(
    rows: Iterable[CanonicalRow], base: Path | None, shapes: BaseShapes
) -> tuple[tuple[CanonicalRow, ...], tuple[CanonicalRow, ...]]:
    """Return (the rows that stay, the copies that equal the base's values).

    base: folder of the base; None: unknown. A copy stays if there are no safetensors to compare it
    with. Raises AdapterMismatchError for trained tokens that a copy does not have, and for LoRA of
    a classification head that the base does not have.
    """
    kept: list[CanonicalRow] = []
    dropped: list[CanonicalRow] = []
    for row in rows:
        if base is None or not is_base_copy(row) or not _is_own(row, base, shapes):
            kept.append(row)
            continue
        own = {name: tensor for name, tensor in row.tensors.items() if name != "base"}
        dropped.append(dataclasses.replace(row, tensors={"base": row.tensors["base"]}))
        if own:
            kept.append(dataclasses.replace(row, tensors=own))
    heads = [row for row in kept if row.layer is None and row.module == SCORE]
    if any(row.kind is RowKind.LORA for row in heads):
        kept = [*(row for row in kept if row not in heads), _whole_score(heads, base)]
    return _joined(kept, shapes), tuple(dropped)


def is_base_copy(row: CanonicalRow) -> bool:
    """Whether the row replaces the base's own parameter, trained or not."""
    return "base" in row.tensors


def _joined(rows: Iterable[CanonicalRow], shapes: BaseShapes) -> tuple[CanonicalRow, ...]:
    """Return the rows with one weight, or some trained tokens, for each end of the model.

    A copy together with trained tokens becomes a copy that has them. A copy of a parameter whose
    module has a trained weight changes only the module that is tied to it.
    """
    others: list[CanonicalRow] = []
    ends: _Ends = {}
    for row in rows:
        if row.layer is None and row.kind in (RowKind.FULL, RowKind.TOKENS):
            ends[row.module, row.kind] = row
        else:
            others.append(row)
    for module, twin in _TWINS.items():
        full = ends.get((module, RowKind.FULL))
        if full is not None and {"weight", "base"} <= full.tensors.keys():
            weight, base = ({name: full.tensors[name]} for name in ("weight", "base"))
            ends[module, RowKind.FULL] = dataclasses.replace(full, tensors=weight)
            if shapes.ties_embeddings:
                of_twin = dataclasses.replace(full, module=twin, tensors=base)
                ends.setdefault((twin, RowKind.FULL), of_twin)
    _put_tokens(ends, shapes)
    return sort_rows([*others, *ends.values()])


def _whole_score(rows: Sequence[CanonicalRow], base: Path | None) -> CanonicalRow:
    """Return the head that LoRA makes of the base's: W + s B A, float32.

    It has few outputs: as a copy it is no larger than other heads. Raises AdapterMismatchError if
    the base has no head of this shape, and UnsupportedFeatureError for other changes in addition.
    """
    lora, *others = sorted(rows, key=lambda row: row.kind is not RowKind.LORA)
    if others or "bias" in lora.tensors:
        raise UnsupportedFeatureError(
            f"{lora.origin}: LoRA of a classification head together with other changes of it is "
            "not served: only plain LoRA, or a whole copy (modules_to_save)"
        )
    a, b = (lora.tensors[name].array().astype("<f8") for name in ("a", "b"))
    try:
        if base is None:
            raise LookupError
        path, name = _place_of([f"{SCORE}.weight"], base)
        pieces = [piece.array().astype("<f8") for piece in read_pieces(path, name, _PIECE_BYTES)]
    except (OSError, ValueError, LookupError) as error:
        raise AdapterMismatchError(
            f"{lora.origin} has LoRA of a classification head; the base model has no "
            f"{SCORE}.weight that it could change: save the whole head with the adapter "
            "(modules_to_save)"
        ) from error
    weight = np.concatenate(pieces)
    if weight.shape != (b.shape[0], a.shape[1]):
        raise AdapterMismatchError(
            f"{lora.origin} has LoRA of a classification head [{b.shape[0]}, {a.shape[1]}]; that "
            f"of the base model is {list(weight.shape)}"
        )
    merged = (weight + lora.scale * (b @ a)).astype("<f4")
    whole = RawTensor("F32", merged.shape, merged.tobytes())
    return dataclasses.replace(lora, kind=RowKind.FULL, scale=1.0, tensors={"weight": whole})


def _put_tokens(ends: _Ends, shapes: BaseShapes) -> None:
    """Put trained tokens into the copy of the parameter that they change, if there is one."""
    tokens = [ends.get((module, RowKind.TOKENS)) for module in (EMBEDDING, LM_HEAD)]
    if shapes.ties_embeddings and tokens[0] is not None and tokens[1] is not None:
        pairs = ((tokens[0].tensors[name], tokens[1].tensors[name]) for name in tokens[0].tensors)
        if all(one.equals(other) for one, other in pairs):
            del ends[LM_HEAD, RowKind.TOKENS]  # the embedding's change a tied lm_head, too
    for module in (LM_HEAD, EMBEDDING):
        trained, copy = ends.get((module, RowKind.TOKENS)), _copy_of(ends, module, shapes)
        if trained is None or copy is None:
            continue
        merged = _with_tokens(copy, trained)
        if not shapes.ties_embeddings:
            tensors = {"base": merged}
        elif module == LM_HEAD:
            ends.setdefault((EMBEDDING, RowKind.FULL), dataclasses.replace(copy, module=EMBEDDING))
            tensors = {"weight": merged}
        else:
            head = ends.get((LM_HEAD, RowKind.FULL))
            if head is not None and is_base_copy(head):
                del ends[LM_HEAD, RowKind.FULL]
            tensors = {"base": merged}
        del ends[module, RowKind.TOKENS]
        ends[module, RowKind.FULL] = dataclasses.replace(copy, module=module, tensors=tensors)


def _copy_of(ends: _Ends, module: str, shapes: BaseShapes) -> CanonicalRow | None:
    """Return the copy of the base's parameter that a module has, be it by a tie."""
    modules = (module, _TWINS[module]) if shapes.ties_embeddings else (module,)
    rows = (ends.get((name, RowKind.FULL)) for name in modules)
    first = next((row for row in rows if row is not None), None)
    return first if first is not None and is_base_copy(first) else None


def _with_tokens(copy: CanonicalRow, trained: CanonicalRow) -> RawTensor:
    """Return the copy's weight with the trained rows."""
    weight, rows = copy.tensors["base"], trained.tensors["weight"]
    indices = trained.tensors["indices"].integers()
    if int(indices.max()) >= weight.shape[0] or weight.shape[1:] != rows.shape[1:]:
        raise AdapterMismatchError(
            f"{trained.origin} has trained rows up to token {indices.max()}, {list(rows.shape)} "
            f"values; its copy of the base's weight has shape {list(weight.shape)}"
        )
    if weight.dtype == rows.dtype:
        bits = weight.bits().copy()
        bits[indices] = rows.bits()
        return RawTensor(weight.dtype, weight.shape, bits.tobytes())
    values = weight.array().astype("<f8" if "F64" in (weight.dtype, rows.dtype) else "<f4")
    values[indices] = rows.array()
    return RawTensor(f"F{8 * values.itemsize}", weight.shape, values.tobytes())


def _is_own(row: CanonicalRow, base: Path, shapes: BaseShapes) -> bool:
    is_tied = row.kind is RowKind.FULL and row.module == LM_HEAD and shapes.ties_embeddings
    module = EMBEDDING if is_tied else row.module
    kind = "weight" if row.kind is RowKind.FULL else "bias"
    paths = shapes.end_paths.get(module) or (parameter_path(module),)
    try:
        path, name = _place_of([f"{path}.{kind}" for path in paths], base)
        return _are_equal(row.tensors["base"], read_pieces(path, name, _PIECE_BYTES))
    except (OSError, ValueError, LookupError, LoraplexError):
        return False


def _place_of(names: Sequence[str], base: Path) -> tuple[Path, str]:
    """Return the file of a tensor, and its name there, by the names that it may have.

    Raises OSError, ValueError, LookupError or LoraplexError if there is none.
    """
    index = base / _INDEX
    files: Mapping[str, str]
    if not (base / _BUILT).exists() and index.exists():
        files = json.loads(index.read_bytes())["weight_map"]
    else:
        file = _BUILT if (base / _BUILT).exists() else _CHECKPOINT
        files = dict.fromkeys(tensor_names(base / file), file)
    found = {without_wrappers(name): name for name in files}
    stored = found[next((name for name in names if name in found), names[0])]
    return base / str(files[stored]), stored


def _are_equal(copy: RawTensor, pieces: Iterator[RawTensor]) -> bool:
    """Whether the pieces, one after another, have the values of the copy."""
    first, view = 0, memoryview(copy.data)
    row_bytes = copy.num_bytes // copy.shape[0]
    for piece in pieces:
        end = first + piece.shape[0]
        if piece.shape[1:] != copy.shape[1:] or end > copy.shape[0]:
            return False
        own = RawTensor(copy.dtype, piece.shape, view[first * row_bytes : end * row_bytes])
        if not np.array_equal(own.array(), piece.array()):
            return False
        first = end
    return first == copy.shape[0]
