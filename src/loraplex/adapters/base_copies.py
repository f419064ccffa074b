"""Removal of whole copies of the base's own weights that an adapter contains.

PEFT saves embed_tokens and lm_head in addition to their LoRA, and whenever it suspects that the
vocabulary was resized, though they were not trained. A copy is removed if all its values equal
those of the base's checkpoint.
"""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from loraplex.adapters.canonical import CanonicalRow, RowKind
from loraplex.adapters.formats.peft_names import parameter_path
from loraplex.adapters.shapes import BaseShapes
from loraplex.adapters.tensor_file import RawTensor, read_pieces
from loraplex.core.adapter import EMBEDDING, LM_HEAD
from loraplex.core.errors import LoraplexError

_CHECKPOINT = "model.safetensors"
_BUILT = "rank0.safetensors"
"""Weights file of a folder that `loraplex compat build` wrote."""
_INDEX = f"{_CHECKPOINT}.index.json"
_PIECE_BYTES = 8 << 20


def without_base_copies(
    rows: Iterable[CanonicalRow], base: Path, shapes: BaseShapes
) -> tuple[tuple[CanonicalRow, ...], tuple[CanonicalRow, ...]]:
    """Return (the rows that stay, the copies that equal the base's values).

    A copy stays if the base in the folder has no safetensors to compare it with.
    """
    kept: list[CanonicalRow] = []
    dropped: list[CanonicalRow] = []
    for row in rows:
        is_same = is_base_copy(row) and _is_own(row, base, shapes)
        (dropped if is_same else kept).append(row)
    return tuple(kept), tuple(dropped)


def is_base_copy(row: CanonicalRow) -> bool:
    """Whether the row replaces the base's own parameter, trained or not."""
    return row.kind is RowKind.FULL and "base" in row.tensors


def _is_own(row: CanonicalRow, base: Path, shapes: BaseShapes) -> bool:
    is_tied = row.module == LM_HEAD and shapes.ties_embeddings
    name = f"{parameter_path(EMBEDDING if is_tied else row.module)}.weight"
    try:
        pieces = read_pieces(_file_of(name, base), name, _PIECE_BYTES)
        return _are_equal(row.tensors["base"], pieces)
    except (OSError, ValueError, LookupError, LoraplexError):
        return False


def _file_of(name: str, base: Path) -> Path:
    """Return the file of a tensor. Raises OSError, ValueError or LookupError if there is none."""
    if (base / _BUILT).exists():
        return base / _BUILT
    index = base / _INDEX
    if not index.exists():
        return base / _CHECKPOINT
    return base / str(json.loads(index.read_bytes())["weight_map"][name])


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
