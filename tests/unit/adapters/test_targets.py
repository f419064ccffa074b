"""Rows as pieces of the pool."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.adapters.canonical import CanonicalRow, RowKind
from loraplex.adapters.shapes import BaseShapes
from loraplex.adapters.targets import source_of, targets_of
from loraplex.adapters.tensor_file import RawTensor
from loraplex.core.adapter import OUTSIDE_LAYERS, LoraTarget, TargetPart
from loraplex.core.rank_limits import RankLimits
from loraplex.memory.adapter_pages import page_geometry, place

SHAPES = BaseShapes(2, {"q_proj": (8, 12), "down_proj": (16, 8)}, vocab_size=50, hidden_size=8)
MAX_RANK = 4
PIECE = 4 * 24


def raw(*shape: int, dtype: str = "F32") -> RawTensor:
    return RawTensor(dtype, shape, bytes(int(np.prod(shape)) * (8 if dtype == "I64" else 4)))


def row(kind=RowKind.LORA, layer=0, module="q_proj", expert=None, **tensors) -> CanonicalRow:
    tensors = tensors or {"a": raw(2, 8), "b": raw(12, 2)}
    return CanonicalRow(layer, module, expert, kind, 1.0, tensors)


def targets(of: CanonicalRow) -> list[LoraTarget]:
    return list(targets_of(of, SHAPES, RankLimits(MAX_RANK)))


def test_the_source_lists_sorted_targets_and_counts_tensor_bytes(tmp_path):
    rows = [row(layer=1), row(module="down_proj", a=raw(3, 16), b=raw(8, 3)), row()]
    source = source_of("d" * 64, tmp_path / "x", rows, SHAPES, RankLimits(MAX_RANK))
    assert source.targets == (
        LoraTarget(0, "down_proj", 3, 16, 8),
        LoraTarget(0, "q_proj", 2, 8, 12),
        LoraTarget(1, "q_proj", 2, 8, 12),
    )
    assert source.num_bytes == 4 * (2 * 20 + 3 * 24 + 2 * 20)


def test_vectors_beside_a_linear_layer():
    lora = row(a=raw(2, 8), b=raw(12, 2), bias=raw(12))
    assert targets(lora)[1:] == [LoraTarget(0, "q_proj", 1, 0, 12, TargetPart.SHIFT)]
    (factor,) = targets(row(RowKind.MAGNITUDE, magnitude=raw(12)))
    (bias,) = targets(row(RowKind.BIAS, bias=raw(12)))
    assert (factor.part, bias.part) == (TargetPart.FACTOR, TargetPart.BIAS)
    assert factor.num_elements == bias.num_elements == 12


@pytest.mark.parametrize(
    ("of", "part", "num_elements"),
    [
        (row(RowKind.FULL, None, "lm_head", weight=raw(50, 8)), TargetPart.ROWS, 400),
        (row(RowKind.FULL, None, "embed_tokens", base=raw(50, 8)), TargetPart.ROWS, 400),
        (row(RowKind.FULL, None, "norm", weight=raw(8)), TargetPart.ROWS, 8),
        (
            row(
                RowKind.TOKENS,
                None,
                "embed_tokens",
                indices=raw(14, dtype="I64"),
                weight=raw(14, 8),
            ),
            TargetPart.TOKENS,
            112,
        ),
        (row(RowKind.MAGNITUDE, None, "lm_head", magnitude=raw(500)), TargetPart.FACTOR, 500),
    ],
)
def test_what_is_large_is_cut_and_takes_its_true_size(of, part, num_elements):
    pieces = targets(of)
    assert {(piece.layer, piece.part) for piece in pieces} == {
        (OUTSIDE_LAYERS if of.layer is None else of.layer, part)
    }
    assert sum(piece.num_elements for piece in pieces) == num_elements
    assert all(piece.num_elements <= PIECE for piece in pieces)
    ends = [0]
    for piece in pieces:
        assert piece.first == ends[-1]
        ends.append(piece.first + (piece.out_features if part is TargetPart.FACTOR else piece.rank))


def test_lora_of_the_output_layer_is_cut_by_outputs():
    pieces = targets(row(layer=None, module="lm_head", a=raw(3, 8), b=raw(50, 3)))
    assert [(piece.first, piece.out_features) for piece in pieces] == [
        (0, 16),
        (16, 16),
        (32, 16),
        (48, 2),
    ]
    assert {(piece.rank, piece.in_features) for piece in pieces} == {(3, 8)}


def test_lora_of_the_embedding_is_a_row_per_token_and_b():
    pieces = targets(row(layer=None, module="embed_tokens", a=raw(3, 50), b=raw(8, 3)))
    down = [piece for piece in pieces if piece.part is TargetPart.EMBEDDING_A]
    assert [(piece.first, piece.rank, piece.out_features) for piece in down] == [
        (0, 32, 3),
        (32, 18, 3),
    ]
    (up,) = (piece for piece in pieces if piece.part is TargetPart.EMBEDDING_B)
    assert (up.rank, up.out_features) == (3, 8)


def test_ranks_are_those_of_lora_however_many_rows_lie_beside(tmp_path):
    rows = [
        row(),
        row(layer=1, a=raw(4, 8), b=raw(12, 4)),
        row(layer=None, module="embed_tokens", a=raw(3, 50), b=raw(8, 3)),
        row(RowKind.FULL, None, "lm_head", weight=raw(50, 8)),
    ]
    source = source_of("d" * 64, tmp_path / "x", rows, SHAPES, RankLimits(MAX_RANK))
    assert source.ranks == {"embed_tokens": (3, 3), "q_proj": (2, 4)}
    assert max(target.rank for target in source.targets) > 4


LIMITS = (RankLimits(MAX_RANK), RankLimits(1, {"ends": MAX_RANK}))


@given(st.integers(1, MAX_RANK), st.integers(1, 400), st.integers(1, 12), st.sampled_from(LIMITS))
def test_every_piece_fits_a_page(rank, vocab, hidden, limits):
    shapes = BaseShapes(1, {"q_proj": (hidden, 12)}, vocab_size=vocab, hidden_size=hidden)
    geometry = page_geometry(
        [LoraTarget(0, "q_proj", 1, hidden, 12)],
        usual_ranks=RankLimits(1),
        max_ranks=limits,
    )
    rows = [
        row(layer=None, module="lm_head", a=raw(rank, hidden), b=raw(vocab, rank)),
        row(RowKind.FULL, None, "embed_tokens", weight=raw(vocab, hidden)),
        row(RowKind.BIAS, None, "lm_head", bias=raw(vocab)),
    ]
    pieces = [piece for of in rows for piece in targets_of(of, shapes, limits)]
    placed = place(pieces, geometry)
    assert len(placed.places) == len(pieces)
