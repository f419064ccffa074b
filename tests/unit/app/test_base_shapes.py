"""Layers of a base model may differ in each module, and adapters are checked layer by layer."""

import dataclasses

import msgspec
import numpy as np
import pytest

from loraplex.adapters.base_check import check_shapes, check_targets
from loraplex.adapters.canonical import CanonicalRow, RowKind
from loraplex.adapters.fused_modules import fit_modules
from loraplex.adapters.shapes import BaseShapes
from loraplex.adapters.targets import targets_of
from loraplex.adapters.tensor_file import RawTensor
from loraplex.app.builder import base_shapes
from loraplex.core.errors import AdapterMismatchError
from loraplex.core.rank_limits import RankLimits
from loraplex.models.spec import ModelSpec
from support.tiny_decoder import tiny_spec
from support.toy_mixer import toy_layer

LIMITS = RankLimits(8)


def mixed() -> ModelSpec:
    """Return layers with heads of two sizes, q, k and v in one layer, and a mixer of another kind.

    The toy's `o_proj` has a path and a shape of its own.
    """
    usual, wide = tiny_spec(num_hidden_layers=4), tiny_spec(num_hidden_layers=4, head_dim=16)
    fused = tiny_spec("Phi3ForCausalLM", num_hidden_layers=4, pad_token_id=None)
    toy = toy_layer(usual.layers[3], 24, "model.layers.3.conv.")
    out = dataclasses.replace(
        toy.linears["toy_out"], outputs={"o_proj": 32}, paths=("model.layers.3.conv.o_proj",)
    )
    toy = dataclasses.replace(toy, linears={**toy.linears, "toy_out": out})
    layers = (usual.layers[0], wide.layers[1], fused.layers[2], toy)
    return dataclasses.replace(usual, layers=layers)


def lora(layer: int, module: str, num_in: int, num_out: int, path: str = "") -> CanonicalRow:
    a, b = (
        RawTensor("F32", shape, np.ones(shape, "f4").tobytes())
        for shape in ((2, num_in), (num_out, 2))
    )
    origin = path or f"model.layers.{layer}.self_attn.{module}"
    return CanonicalRow(layer, module, None, RowKind.LORA, 1.0, {"a": a, "b": b}, origin)


def test_each_layer_has_its_own_shapes() -> None:
    spec = mixed()
    shapes = base_shapes(spec)
    assert shapes.of_layers() == [dict(layer) for layer in spec.module_shapes]
    assert list(shapes.own_layers) == [1, 3], "the fused layer's modules have names of their own"
    assert [shapes.layer(layer).head_dim for layer in range(3)] == [8, 16, 8]
    assert msgspec.json.decode(msgspec.json.encode(shapes), type=BaseShapes) == shapes
    equal = base_shapes(tiny_spec(num_hidden_layers=4))
    assert (equal.own_layers, equal.module_layers) == ({}, {}), "equal layers are described once"


@pytest.mark.parametrize(
    ("row", "is_right"),
    [
        (lora(0, "q_proj", 32, 32), True),
        (lora(1, "q_proj", 32, 64), True),
        (lora(0, "q_proj", 32, 64), False),
        (lora(1, "q_proj", 32, 32), False),
        (lora(1, "o_proj", 64, 32), True),
        (lora(3, "o_proj", 24, 32, "model.layers.3.conv.o_proj"), True),
        (lora(3, "o_proj", 24, 32), False),
        (lora(3, "o_proj", 32, 32, "model.layers.3.conv.o_proj"), False),
        (lora(3, "q_proj", 32, 32), False),
        (lora(2, "q_proj", 32, 32), False),
    ],
    ids=lambda value: value.origin if isinstance(value, CanonicalRow) else None,
)
def test_rows_fit_their_own_layer(row: CanonicalRow, is_right: bool) -> None:
    shapes = base_shapes(mixed())
    targets = list(targets_of(row, shapes, LIMITS))
    if is_right:
        check_shapes([row], shapes, LIMITS)
        check_targets(targets, shapes, LIMITS)
        return
    with pytest.raises(AdapterMismatchError):
        check_shapes([row], shapes, LIMITS)
    if row.origin.endswith("conv.o_proj") or row.layer in (1, 2):
        with pytest.raises(AdapterMismatchError):
            check_targets(targets, shapes, LIMITS)


def test_parts_are_joined_in_layers_that_have_them_fused() -> None:
    shapes = base_shapes(mixed())
    rows = fit_modules([lora(0, "q_proj", 32, 32), lora(2, "q_proj", 32, 32)], shapes)
    assert [(row.layer, row.module) for row in rows] == [(0, "q_proj"), (2, "qkv_proj")]
    check_shapes(rows, shapes, LIMITS)
    (split, *_) = fit_modules([lora(0, "qkv_proj", 32, 64)], shapes)
    assert split.layer == 0
    assert split.module in {"q_proj", "k_proj", "v_proj"}
    (whole,) = fit_modules([lora(2, "qkv_proj", 32, 64)], shapes)
    assert whole.module == "qkv_proj"
