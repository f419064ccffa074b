"""Random adapters of every kind through PEFT's form, and plain ones through TensorRT-LLM's."""

import json

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from loraplex.adapters.canonical import CanonicalRow, RowKind, digest
from loraplex.adapters.formats import peft, trtllm
from loraplex.adapters.formats.export import StorageType, lora_tensors
from loraplex.adapters.formats.export_peft import peft_config, peft_tensors
from loraplex.adapters.formats.peft_config import parse_config
from loraplex.adapters.shapes import BaseShapes
from loraplex.adapters.tensor_file import RawTensor

HIDDEN, VOCAB = 8, 20
MODULES = {
    "q_proj": (8, 12), "k_proj": (8, 4), "v_proj": (8, 4), "o_proj": (12, 8),
    "gate_proj": (8, 16), "up_proj": (8, 16), "down_proj": (16, 8),
}  # fmt: skip
SHAPES = BaseShapes(3, MODULES, VOCAB, HIDDEN, tuple(MODULES))
MAX_RANK = 5


def values(rng: np.random.Generator, *shape: int) -> RawTensor:
    return RawTensor("F32", shape, rng.normal(size=shape).astype("<f4").tobytes())


def lora(rng, layer, module, rank, scale, has_bias=False) -> CanonicalRow:
    ends = {"lm_head": (HIDDEN, VOCAB), "embed_tokens": (VOCAB, HIDDEN)}
    num_in, num_out = MODULES.get(module) or ends[module]
    tensors = {"a": values(rng, rank, num_in), "b": values(rng, num_out, rank)}
    if has_bias:
        tensors["bias"] = values(rng, num_out)
    return CanonicalRow(layer, module, None, RowKind.LORA, scale, tensors, path(layer, module))


def path(layer: int | None, module: str) -> str:
    if layer is None:
        return module if module == "lm_head" else f"model.{module}"
    parent = "mlp" if module in ("gate_proj", "up_proj", "down_proj") else "self_attn"
    return f"model.layers.{layer}.{parent}.{module}"


@st.composite
def plain_adapters(draw, *, has_bias: bool = False) -> list[CanonicalRow]:
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    places = st.tuples(st.integers(0, 2), st.sampled_from(sorted(MODULES)))
    chosen = draw(st.sets(places, min_size=1, max_size=12))
    ranks = st.integers(1, MAX_RANK)
    scales = st.floats(-(2.0**20), 2.0**20, width=32).filter(lambda scale: scale != 0)
    return [
        lora(rng, layer, module, draw(ranks), draw(scales), has_bias)
        for layer, module in sorted(chosen)
    ]


@st.composite
def adapters(draw) -> list[CanonicalRow]:
    """Draw the rows of an adapter that PEFT can express in one config."""
    has_bias = draw(st.booleans())
    rows = draw(plain_adapters(has_bias=has_bias))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    if not has_bias and draw(st.booleans()):
        vectors = [values(rng, row.tensors["b"].shape[0]) for row in rows]
        rows += [
            CanonicalRow(
                row.layer,
                row.module,
                None,
                RowKind.MAGNITUDE,
                1.0,
                {"magnitude": vector},
                row.origin,
            )
            for row, vector in zip(tuple(rows), vectors, strict=True)
        ]
    elif not has_bias and draw(st.booleans()):
        rows.append(lora(rng, None, "embed_tokens", draw(st.integers(1, MAX_RANK)), 2.0))
    for module in ("embed_tokens", "lm_head"):
        taken = any(row.module == module for row in rows)
        kind = draw(st.sampled_from((None, "weight", "base", "tokens")))
        if kind in ("weight", "base") and not (taken and kind == "weight"):
            tensors = {kind: values(rng, VOCAB, HIDDEN)}
            rows.append(
                CanonicalRow(None, module, None, RowKind.FULL, 1.0, tensors, path(None, module))
            )
        elif kind == "tokens" and not taken:
            ids = rng.permutation(VOCAB)[:3].astype("<i8")
            tensors = {
                "indices": RawTensor("I64", (3,), ids.tobytes()),
                "weight": values(rng, 3, HIDDEN),
            }
            rows.append(
                CanonicalRow(None, module, None, RowKind.TOKENS, 1.0, tensors, path(None, module))
            )
    if draw(st.booleans()):
        module = draw(st.sampled_from(sorted(MODULES)))
        bias = {"bias": values(rng, MODULES[module][1])}
        rows.append(CanonicalRow(0, module, None, RowKind.BIAS, 1.0, bias, path(0, module)))
    return rows


def read_again(rows: list[CanonicalRow]) -> tuple[CanonicalRow, ...]:
    config = parse_config(json.dumps(peft_config(rows)).encode())
    return peft.canonical_rows(config, peft_tensors(rows))


@given(adapters())
def test_peft_s_form_holds_everything_bit_for_bit(rows):
    assert digest(read_again(rows)) == digest(rows)


@given(plain_adapters())
def test_the_pair_holds_plain_lora_and_its_scale_in_b(rows):
    pair = lora_tensors(rows, StorageType.FLOAT32)
    from_pair = trtllm.canonical_rows(*pair, SHAPES, MAX_RANK)
    places = {(row.layer, row.module): row for row in rows}
    assert {(row.layer, row.module) for row in from_pair} == set(places)
    for row in from_pair:
        source = places[row.layer, row.module]
        assert bytes(row.tensors["a"].data) == bytes(source.tensors["a"].data)
        scaled = source.tensors["b"].array() * np.float32(source.scale)
        np.testing.assert_array_equal(row.tensors["b"].array(), scaled)
    # Through PEFT's form and back into a pair: the very same tensors.
    again = lora_tensors(read_again(list(from_pair)), StorageType.FLOAT32)
    assert [bytes(tensor.data) for tensor in again] == [bytes(tensor.data) for tensor in pair]
