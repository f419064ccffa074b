"""Random adapters of every kind through PEFT's form, and plain ones through TensorRT-LLM's."""

import json

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from loraplex.adapters.canonical import CanonicalRow, RowKind, digest, sort_rows
from loraplex.adapters.formats import peft, trtllm
from loraplex.adapters.formats.export import StorageType, lora_tensors
from loraplex.adapters.formats.export_peft import peft_config, peft_tensors
from loraplex.adapters.formats.peft_config import parse_config
from loraplex.adapters.shapes import BaseShapes
from loraplex.adapters.tensor_file import RawTensor
from loraplex.core.rank_limits import RankLimits

HIDDEN, VOCAB = 8, 20
MODULES = {
    "q_proj": (8, 12), "k_proj": (8, 4), "v_proj": (8, 4), "o_proj": (12, 8),
    "gate_proj": (8, 16), "up_proj": (8, 16), "down_proj": (16, 8),
}  # fmt: skip
SHAPES = BaseShapes(3, MODULES, VOCAB, HIDDEN, tuple(MODULES))
MAX_RANK = 5

NUM_EXPERTS = 4
ATTENTION = {name: MODULES[name] for name in ("q_proj", "k_proj", "v_proj", "o_proj")}
OF_EXPERTS = {
    "experts.gate_proj": (8, 6), "experts.up_proj": (8, 6), "experts.down_proj": (6, 8),
}  # fmt: skip
WITH_EXPERTS = {
    **OF_EXPERTS, "router": (8, NUM_EXPERTS), "shared_expert_gate": (8, 1),
    "shared_expert.gate_proj": (8, 10), "shared_expert.up_proj": (8, 10),
    "shared_expert.down_proj": (10, 8),
}  # fmt: skip
DENSE_LAYER = 0
MIXTURE = BaseShapes(
    3,
    MODULES | WITH_EXPERTS,
    VOCAB,
    HIDDEN,
    num_experts=dict.fromkeys(OF_EXPERTS, NUM_EXPERTS),
    module_layers=dict.fromkeys(set(MODULES) - set(ATTENTION), (DENSE_LAYER,))
    | dict.fromkeys(WITH_EXPERTS, (1, 2)),
)
"""A base whose first layer is dense and whose others have experts."""


def values(rng: np.random.Generator, *shape: int) -> RawTensor:
    return RawTensor("F32", shape, rng.normal(size=shape).astype("<f4").tobytes())


def lora(rng, layer, module, rank, scale, has_bias=False, expert=None) -> CanonicalRow:
    ends = {"lm_head": (HIDDEN, VOCAB), "embed_tokens": (VOCAB, HIDDEN)}
    num_in, num_out = MIXTURE.modules.get(module) or ends[module]
    tensors = {"a": values(rng, rank, num_in), "b": values(rng, num_out, rank)}
    if has_bias:
        tensors["bias"] = values(rng, num_out)
    origin = path(layer, module, expert)
    return CanonicalRow(layer, module, expert, RowKind.LORA, scale, tensors, origin)


def path(layer: int | None, module: str, expert: int | None = None) -> str:
    if module in WITH_EXPERTS:
        name = "gate" if module == "router" else module
        return f"model.layers.{layer}.mlp.{name.replace('experts.', f'experts.{expert}.')}"
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
def expert_adapters(draw) -> list[CanonicalRow]:
    """Draw rows of a mixture of experts: any of its modules, experts, ranks and scales."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    possible = [
        (layer, module, expert)
        for module in MIXTURE.modules
        for layer in MIXTURE.module_layers.get(module, range(3))
        for expert in (range(NUM_EXPERTS) if module in OF_EXPERTS else (None,))
    ]
    chosen = draw(st.lists(st.sampled_from(possible), min_size=1, max_size=16, unique=True))
    ranks, scales = st.integers(1, MAX_RANK), st.sampled_from((0.5, 1.0, 3.0, 1 / 3))
    return [
        lora(rng, layer, module, draw(ranks), float(np.float32(draw(scales))), expert=expert)
        for layer, module, expert in chosen
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


def is_mixture(rows: list[CanonicalRow]) -> bool:
    return any(row.module in WITH_EXPERTS for row in rows)


def read_again(rows: list[CanonicalRow]) -> tuple[CanonicalRow, ...]:
    config = parse_config(json.dumps(peft_config(rows)).encode())
    return peft.canonical_rows(config, peft_tensors(rows))


@given(adapters())
def test_peft_s_form_holds_everything_bit_for_bit(rows):
    assert digest(read_again(rows)) == digest(rows)


@given(expert_adapters())
def test_peft_s_form_holds_experts_bit_for_bit(rows):
    assert digest(read_again(rows)) == digest(rows)
    assert [row.origin for row in read_again(rows)] == [row.origin for row in sort_rows(rows)]


@given(plain_adapters() | expert_adapters())
def test_the_pair_holds_plain_lora_and_its_scale_in_b(rows):
    """Experts of different rank share a row, and each has its own rank when it is read."""
    pair = lora_tensors(rows, StorageType.FLOAT32, NUM_EXPERTS)
    from_pair = trtllm.canonical_rows(
        *pair, MIXTURE if is_mixture(rows) else SHAPES, RankLimits(MAX_RANK)
    )
    places = {(row.layer, row.module, row.expert): row for row in rows}
    assert {(row.layer, row.module, row.expert) for row in from_pair} == set(places)
    for row in from_pair:
        source = places[row.layer, row.module, row.expert]
        assert row.origin == source.origin
        assert bytes(row.tensors["a"].data) == bytes(source.tensors["a"].data)
        scaled = source.tensors["b"].array() * np.float32(source.scale)
        np.testing.assert_array_equal(row.tensors["b"].array(), scaled)
    # Through PEFT's form and back into a pair: the very same tensors.
    again = lora_tensors(read_again(list(from_pair)), StorageType.FLOAT32, NUM_EXPERTS)
    assert [bytes(tensor.data) for tensor in again] == [bytes(tensor.data) for tensor in pair]
