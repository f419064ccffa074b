"""The tensors of a canonical adapter file as the pieces that staging cut them into."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from loraplex.adapters.canonical import CanonicalFile, CanonicalRow, RowKind
from loraplex.adapters.shapes import BaseShapes
from loraplex.adapters.targets import source_of
from loraplex.adapters.tensor_file import RawTensor
from loraplex.core.adapter import LoraTarget, TargetPart
from loraplex.core.errors import InvalidAdapterError
from loraplex.core.rank_limits import RankLimits
from loraplex.execution.adapters.host_adapters import HostAdapter
from loraplex.execution.adapters.loader import host_adapter
from support.naming import naming

SHAPES = BaseShapes(
    2, {"q_proj": (8, 12)}, vocab_size=50, hidden_size=8, biased_modules=("q_proj",)
)
MAX_RANK = 4


def raw(*shape: int, dtype: str = "<f4") -> RawTensor:
    names = {"<f4": "F32", "<f2": "F16", "<i8": "I64"}
    array = np.arange(1, 1 + int(np.prod(shape)), dtype=dtype).reshape(shape)
    return RawTensor(names[dtype], shape, bytearray(array.tobytes()))


def row(
    kind: RowKind, module="q_proj", layer: int | None = 0, scale=1.0, **tensors
) -> CanonicalRow:
    return CanonicalRow(layer, module, None, kind, scale, tensors, f"{layer}.{module}")


LORA = row(RowKind.LORA, a=raw(2, 8), b=raw(12, 2), bias=raw(12), scale=0.5)
ROWS = {
    "lora": LORA,
    "magnitude": row(RowKind.MAGNITUDE, magnitude=raw(12)),
    "factor": row(RowKind.MAGNITUDE, factor=raw(12)),
    "bias": row(RowKind.BIAS, bias=raw(12, dtype="<f2")),
    "head": row(RowKind.LORA, "lm_head", None, a=raw(2, 8), b=raw(50, 2)),
    "copy": row(RowKind.FULL, "lm_head", None, weight=raw(50, 8)),
    "base": row(RowKind.FULL, "embed_tokens", None, base=raw(50, 8)),
    "embedding": row(RowKind.LORA, "embed_tokens", None, 0.25, a=raw(2, 50), b=raw(8, 2)),
    "tokens": row(
        RowKind.TOKENS, "embed_tokens", None, indices=raw(14, dtype="<i8"), weight=raw(14, 8)
    ),
}


def pieces_of(*rows: CanonicalRow) -> HostAdapter:
    source = source_of("d", Path("x"), rows, SHAPES, RankLimits(MAX_RANK))
    return host_adapter(CanonicalFile("d", rows), source.targets)


def values(row: CanonicalRow, name: str) -> torch.Tensor:
    return torch.from_numpy(row.tensors[name].array().copy())


def joined(adapter: HostAdapter, part: TargetPart) -> torch.Tensor:
    own = [piece for piece in adapter.parts if piece.target.part is part]
    return torch.cat([piece.values for piece in sorted(own, key=lambda p: p.target.first)])


def test_lora_and_its_bias():
    adapter = pieces_of(LORA)
    (weight,) = adapter.weights
    assert torch.equal(weight.a, values(LORA, "a"))
    assert torch.equal(weight.b, values(LORA, "b"))
    assert weight.scale == 0.5
    (shift,) = adapter.parts
    assert (shift.target.part, shift.scale) == (TargetPart.SHIFT, 0.5)


def test_the_output_layer_s_lora_is_cut_but_whole():
    adapter = pieces_of(ROWS["head"])
    assert len(adapter.weights) > 1
    pieces = sorted(adapter.weights, key=lambda weight: weight.target.first)
    assert torch.equal(torch.cat([w.b for w in pieces]), values(ROWS["head"], "b"))
    assert all(torch.equal(w.a, values(ROWS["head"], "a")) for w in adapter.weights)


@pytest.mark.parametrize(
    ("name", "tensor", "part"),
    [
        ("magnitude", "magnitude", TargetPart.FACTOR),
        ("factor", "factor", TargetPart.FACTOR),
        ("bias", "bias", TargetPart.BIAS),
        ("copy", "weight", TargetPart.ROWS),
        ("base", "base", TargetPart.ROWS),
        ("tokens", "weight", TargetPart.TOKENS),
    ],
)
def test_every_value_once_and_in_its_type(name, tensor, part):
    of = ROWS[name]
    adapter = pieces_of(of)
    assert torch.equal(joined(adapter, part), values(of, tensor))
    assert {piece.is_base for piece in adapter.parts} == {name == "base"}
    assert {piece.is_quotient for piece in adapter.parts} == {name == "factor"}


def test_an_embedding_s_matrices_are_turned():
    adapter = pieces_of(ROWS["embedding"])
    a, b = (joined(adapter, part) for part in (TargetPart.EMBEDDING_A, TargetPart.EMBEDDING_B))
    assert torch.equal(a, values(ROWS["embedding"], "a").t())
    assert torch.equal(b, values(ROWS["embedding"], "b").t())
    scales = {p.scale for p in adapter.parts if p.target.part is TargetPart.EMBEDDING_A}
    assert scales == {0.25}


def test_the_ids_of_trained_tokens_stay_with_their_rows():
    pieces = sorted(pieces_of(ROWS["tokens"]).parts, key=lambda piece: piece.target.first)
    assert torch.cat([piece.indices for piece in pieces]).tolist() == list(range(1, 15))


@pytest.mark.parametrize("name", ROWS)
def test_a_piece_that_is_missing_or_another_is_refused(name):
    of = ROWS[name]
    targets = source_of("d", Path("x"), [of], SHAPES, RankLimits(MAX_RANK)).targets
    content = CanonicalFile("d", (of,))
    with pytest.raises(InvalidAdapterError, match="another adapter"):
        host_adapter(content, targets[1:])
    other = dataclasses.replace(of, module="o_proj")
    with pytest.raises(InvalidAdapterError, match="it has no"):
        host_adapter(CanonicalFile("d", (other,)), targets)


def test_a_tensor_of_another_shape_is_refused():
    target = LoraTarget(0, "q_proj", 3, 8, 12)
    bare = dataclasses.replace(LORA, tensors={"a": raw(2, 8), "b": raw(12, 2)})
    with pytest.raises(InvalidAdapterError, match=naming("q_proj", 0, "LoraTarget")):
        host_adapter(CanonicalFile("d", (bare,)), [target])
    with pytest.raises(InvalidAdapterError, match=naming("b", "0.q_proj")):
        host_adapter(
            CanonicalFile("d", (dataclasses.replace(LORA, tensors={"a": raw(2, 8)}),)),
            [LoraTarget(0, "q_proj", 2, 8, 12)],
        )
