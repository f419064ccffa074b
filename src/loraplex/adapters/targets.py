"""Targets of an adapter: the pieces of its rows in the engine's pool, with their sizes.

Staging computes them, once it knows the base; the engine places and fills them. No piece
that is cut is larger than one linear layer of the base at the largest rank of the ends, so each
fits in a page.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path

from loraplex.adapters.canonical import CanonicalRow, RowKind, sort_rows
from loraplex.adapters.shapes import BaseShapes
from loraplex.core.adapter import (
    EMBEDDING,
    LM_HEAD,
    AdapterSource,
    LoraTarget,
    TargetPart,
    head_block_size,
    join_experts,
)
from loraplex.core.rank_limits import RankLimits


def source_of(
    adapter_digest: str,
    path: Path,
    rows: Iterable[CanonicalRow],
    shapes: BaseShapes,
    max_ranks: RankLimits,
) -> AdapterSource:
    """Return the engine's description of a staged adapter. The rows must have been checked."""
    ordered = sort_rows(rows)
    return AdapterSource(
        digest=adapter_digest,
        path=str(path),
        num_bytes=sum(row.num_bytes for row in ordered),
        targets=tuple(
            join_experts(sorted(t for row in ordered for t in targets_of(row, shapes, max_ranks)))
        ),
    )


def targets_of(
    row: CanonicalRow, shapes: BaseShapes, max_ranks: RankLimits
) -> Iterator[LoraTarget]:
    """Yield the pieces of one row."""
    piece = max_ranks.of(LM_HEAD) * shapes.largest_target
    match row.kind:
        case RowKind.LORA if row.module == EMBEDDING:
            a, b = row.tensors["a"].shape, row.tensors["b"].shape
            yield from _row_blocks(row, TargetPart.EMBEDDING_A, (a[1], a[0]), piece)
            yield from _row_blocks(row, TargetPart.EMBEDDING_B, (b[1], b[0]), piece)
        case RowKind.LORA:
            yield from _lora(row, shapes)
            if "bias" in row.tensors:
                yield from _vector(row, TargetPart.SHIFT, "bias", piece)
        case RowKind.MAGNITUDE:
            # With a bias the layer's factor comes with a shift, which takes the bias back out.
            num_vectors = 2 if shapes.is_biased(row.layer, row.module) else 1
            (name,) = row.tensors
            yield from _vector(row, TargetPart.FACTOR, name, piece // 2, num_vectors)
        case RowKind.BIAS:
            yield from _vector(row, TargetPart.BIAS, "bias", piece)
        case RowKind.FULL:
            yield from _row_blocks(row, TargetPart.ROWS, _full_shape(row), piece)
        case RowKind.TOKENS:
            rows, columns = row.tensors["weight"].shape
            yield from _row_blocks(row, TargetPart.TOKENS, (rows, columns), piece)


def full_weight(row: CanonicalRow) -> str:
    """Return the name of a FULL row's one tensor."""
    return "weight" if "weight" in row.tensors else "base"


def _full_shape(row: CanonicalRow) -> tuple[int, int]:
    """Return (rows, columns); a norm's vector is one row."""
    shape = row.tensors[full_weight(row)].shape
    return (1, shape[0]) if len(shape) == 1 else (shape[0], shape[1])


def _lora(row: CanonicalRow, shapes: BaseShapes) -> Iterator[LoraTarget]:
    rank, in_features = row.tensors["a"].shape
    out_features = row.tensors["b"].shape[0]
    block = out_features
    if row.module == LM_HEAD:
        block = head_block_size(shapes.largest_target, shapes.hidden_size)
    for first in range(0, out_features, block):
        size = min(block, out_features - first)
        sizes = (rank, in_features, size)
        yield LoraTarget(row.target_layer, row.module, *sizes, first=first, expert=row.expert or 0)


def _vector(
    row: CanonicalRow, part: TargetPart, name: str, piece: int, num_vectors: int = 1
) -> Iterator[LoraTarget]:
    (length,) = row.tensors[name].shape
    for first in range(0, length, piece):
        size = min(piece, length - first)
        yield LoraTarget(row.target_layer, row.module, num_vectors, 0, size, part, first)


def _row_blocks(
    row: CanonicalRow, part: TargetPart, shape: tuple[int, int], piece: int
) -> Iterator[LoraTarget]:
    num_rows, columns = shape
    block = max(1, piece // columns)
    for first in range(0, num_rows, block):
        size = min(block, num_rows - first)
        yield LoraTarget(row.target_layer, row.module, size, 0, columns, part, first)
