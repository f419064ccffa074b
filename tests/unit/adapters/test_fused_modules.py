"""Adapters of fused projections on separate ones, and the other way round."""

import itertools
import json

import numpy as np
import pytest

from loraplex.adapters.base_check import check_shapes
from loraplex.adapters.canonical import CanonicalRow, RowKind
from loraplex.adapters.formats import trtllm
from loraplex.adapters.formats.peft_config import parse_config
from loraplex.adapters.formats.peft_coverage import target_warnings
from loraplex.adapters.formats.peft_names import is_of_other_tower, parse_name
from loraplex.adapters.fused_modules import fit_modules
from loraplex.adapters.shapes import BaseShapes
from loraplex.adapters.tensor_file import RawTensor
from loraplex.core.adapter import EMBEDDING, LM_HEAD
from loraplex.core.errors import AdapterMismatchError, UnsupportedFeatureError
from loraplex.core.rank_limits import RankLimits
from support.naming import naming

HIDDEN, INNER = 6, 10
QKV = {"q_proj": 6, "k_proj": 4, "v_proj": 4}
GATE_UP = {"gate_proj": INNER, "up_proj": INNER}
SEPARATE = BaseShapes(2, {part: (HIDDEN, size) for part, size in (QKV | GATE_UP).items()})
FUSED = BaseShapes(
    2,
    {"qkv_proj": (HIDDEN, 14), "gate_up_proj": (HIDDEN, 2 * INNER)},
    fused={"qkv_proj": QKV, "gate_up_proj": GATE_UP},
)
RANDOM = np.random.default_rng(3)


def tensor(*shape: int, dtype: str = "F32") -> RawTensor:
    values = RANDOM.standard_normal(shape).astype("<f4" if dtype == "F32" else "<f2")
    return RawTensor(dtype, shape, values.tobytes())


def lora(module: str, out: int, rank: int, scale: float = 0.5, **more: RawTensor) -> CanonicalRow:
    dtype = "F16" if rank == 1 else "F32"
    tensors = {"a": tensor(rank, HIDDEN, dtype=dtype), "b": tensor(out, rank, dtype=dtype)}
    origin = f"model.layers.1.self_attn.{module}"
    return CanonicalRow(1, module, None, RowKind.LORA, scale, tensors | more, origin)


def delta(row: CanonicalRow) -> np.ndarray:
    product = row.tensors["b"].array().astype(float) @ row.tensors["a"].array().astype(float)
    return row.scale * product


@pytest.mark.parametrize("scales", [(0.5, 0.5, 0.5), (0.5, 2.0, 0.25)])
@pytest.mark.parametrize("ranks", [(2, 3, 4), (1, 2, 1)])
@pytest.mark.parametrize("parts", [tuple(QKV), ("q_proj", "v_proj"), ("k_proj",)])
def test_separate_lora_on_a_fused_base(
    parts: tuple[str, ...], ranks: tuple[int, ...], scales: tuple[float, ...]
) -> None:
    rows = [lora(part, QKV[part], r, s) for part, r, s in zip(parts, ranks, scales, strict=False)]
    (row,) = fit_modules(rows, FUSED)
    assert row.module == "qkv_proj"
    assert row.origin == "model.layers.1.self_attn.qkv_proj"
    check_shapes([row], FUSED, max_ranks=RankLimits(16))
    deltas = {each.module: delta(each) for each in rows}
    zeros = {part: np.zeros((size, HIDDEN)) for part, size in QKV.items()}
    expected = np.concatenate([deltas.get(part, zeros[part]) for part in QKV])
    np.testing.assert_allclose(delta(row), expected, rtol=1e-6, atol=1e-6)


def test_one_a_stays_one() -> None:
    first = lora("gate_proj", INNER, 2)
    second = lora("up_proj", INNER, 2)
    second.tensors["a"] = first.tensors["a"]  # type: ignore[index]
    (row,) = fit_modules([first, second], FUSED)
    assert row.tensors["a"].shape == (2, HIDDEN)
    np.testing.assert_array_equal(delta(row), np.concatenate([delta(first), delta(second)]))


def test_fused_lora_on_a_separate_base() -> None:
    row = lora("qkv_proj", 14, 3, bias=tensor(14))
    rows = fit_modules([row], SEPARATE)
    by_module = {each.module: each for each in rows}
    check_shapes(
        [row for row in rows if "bias" not in row.tensors], SEPARATE, max_ranks=RankLimits(3)
    )
    assert list(by_module) == sorted(QKV)
    np.testing.assert_array_equal(
        np.concatenate([delta(by_module[part]) for part in QKV]), delta(row)
    )
    biases = [by_module[part].tensors["bias"].array() for part in QKV]
    np.testing.assert_array_equal(np.concatenate(biases), row.tensors["bias"].array())
    assert by_module["k_proj"].origin == "model.layers.1.self_attn.k_proj"


def test_there_and_back() -> None:
    row = lora("gate_up_proj", 2 * INNER, 4)
    (back,) = fit_modules(fit_modules([row], SEPARATE), FUSED)
    assert back.tensors["a"].data == row.tensors["a"].data
    assert back.tensors["b"].data == row.tensors["b"].data


def test_dora_needs_all_parts() -> None:
    magnitudes = [
        CanonicalRow(1, part, None, RowKind.MAGNITUDE, 1.0, {"magnitude": tensor(size)}, part)
        for part, size in QKV.items()
    ]
    (row,) = fit_modules(magnitudes, FUSED)
    expected = np.concatenate([each.tensors["magnitude"].array() for each in magnitudes])
    np.testing.assert_array_equal(row.tensors["magnitude"].array(), expected)
    with pytest.raises(UnsupportedFeatureError, match=naming("v_proj", "q_proj")):
        fit_modules(magnitudes[:2], FUSED)


def test_what_does_not_fit_is_named() -> None:
    with pytest.raises(AdapterMismatchError, match=naming("model.layers.1.self_attn.qkv_proj", 15)):
        fit_modules([lora("qkv_proj", 15, 2)], SEPARATE)
    with pytest.raises(AdapterMismatchError, match=naming(5, 6, "q_proj")):
        fit_modules([lora("q_proj", 5, 2)], FUSED)
    with pytest.raises(
        AdapterMismatchError,
        match=naming(
            "qkv_proj", "model.layers.1.self_attn.q_proj", "model.layers.1.self_attn.qkv_proj"
        ),
    ):
        fit_modules([lora("qkv_proj", 14, 2), lora("q_proj", 6, 2)], FUSED)


@pytest.mark.parametrize("module_id", [5, 18])
def test_trtllm_gate_up_of_a_fused_base_has_up_first(module_id: int) -> None:
    a, b = RANDOM.standard_normal((2, HIDDEN)), RANDOM.standard_normal((2 * INNER, 2))
    weights = np.concatenate([a.ravel(), b.ravel()]).astype("<f4")[None]
    config = np.array([[module_id, 1, 2]], "<i4")
    rows = trtllm.canonical_rows(
        RawTensor("F32", weights.shape, weights.tobytes()),
        RawTensor("I32", config.shape, config.tobytes()),
        FUSED,
        max_ranks=RankLimits(2),
    )
    (row,) = fit_modules(rows, FUSED)
    up, gate = np.split(b.astype("<f4"), 2)
    np.testing.assert_array_equal(row.tensors["b"].array(), np.concatenate([gate, up]))


PATHS = [
    ("gpt_neox.layers.7.attention.query_key_value", "query_key_value"),
    ("gpt_neox.layers.7.mlp.dense_4h_to_h", "dense_4h_to_h"),
    ("transformer.h.7.self_attention.dense", "dense"),
    ("transformer.h.7.attn.q_proj", "q_proj"),
    ("transformer.h.7.mlp.fc_in", "fc_in"),
    ("model.decoder.layers.7.fc1", "fc1"),
    ("model.layers.7.feed_forward.w1", "w1"),
    ("model.layers.7.self_attn.qkv_proj", "qkv_proj"),
    ("language_model.model.layers.7.mlp.gate_proj", "gate_proj"),
    ("model.language_model.layers.7.mlp.gate_proj", "gate_proj"),
    ("model.language_model.model.layers.7.mlp.gate_proj", "gate_proj"),
]


@pytest.mark.parametrize(("path", "module"), PATHS)
@pytest.mark.parametrize("prefix", ["base_model.model.", ""])
def test_roots_and_parents(prefix: str, path: str, module: str) -> None:
    parsed = parse_name(f"{prefix}{path}.lora_A.weight")
    assert parsed is not None
    assert (parsed.layer, parsed.module, parsed.path) == (7, module, path)


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("gpt_neox.embed_in", EMBEDDING),
        ("transformer.word_embeddings", EMBEDDING),
        ("model.language_model.embed_tokens", EMBEDDING),
        ("model.tok_embeddings", EMBEDDING),
        ("embed_out", LM_HEAD),
        ("output", LM_HEAD),
        ("language_model.lm_head", LM_HEAD),
        ("model.lm_head", LM_HEAD),
    ],
)
def test_ends_by_other_names(name: str, module: str) -> None:
    slot = "lora_embedding_A" if module == EMBEDDING else "lora_A.weight"
    parsed = parse_name(f"base_model.model.{name}.{slot}")
    assert parsed is not None
    assert (parsed.layer, parsed.module) == (None, module)


@pytest.mark.parametrize(
    "name",
    [
        "x.layers.0.self_attn.q_proj",
        "model.layers.0.mlp.experts.x.gate_proj",
        "model.layers.0.self_attn.rotary.q_proj",
        "model.vision_tower.layers.0.self_attn.q_proj",
    ],
)
def test_other_names_are_of_no_module(name: str) -> None:
    assert parse_name(f"base_model.model.{name}.lora_A.weight") is None


def test_other_towers() -> None:
    towers = ["visual.blocks.0.attn.qkv", "model.vision_tower.x", "multi_modal_projector.linear_1"]
    prefixes = ["base_model.model.", "base_model.model.model.", ""]
    for prefix, tower in itertools.product(prefixes, towers):
        assert is_of_other_tower(f"{prefix}{tower}.lora_A.weight")
    assert not is_of_other_tower("base_model.model.model.layers.0.mlp.visual_proj.lora_A.weight")


def test_the_nearest_names_are_reported() -> None:
    shapes = BaseShapes(
        2, {"query_key_value": (HIDDEN, 14)}, paths={"query_key_value": "h.{}.attn.query_key_value"}
    )
    row = lora("query_key_values", 14, 2)
    with pytest.raises(
        AdapterMismatchError, match=naming("h.1.attn.query_key_value", "query_key_values")
    ):
        check_shapes([_at(row, "h.1.attn.query_key_values")], shapes, max_ranks=RankLimits(8))
    row = lora("query_key_value", 14, 2)
    with pytest.raises(AdapterMismatchError, match=naming("query_key_value")):
        check_shapes([_at(row, "h.1.mlp.query_key_value")], shapes, max_ranks=RankLimits(8))
    check_shapes(
        [_at(row, "transformer.h.1.attn.query_key_value")], shapes, max_ranks=RankLimits(8)
    )


def _at(row: CanonicalRow, origin: str) -> CanonicalRow:
    return CanonicalRow(row.layer, row.module, None, row.kind, row.scale, row.tensors, origin)


@pytest.mark.parametrize(
    ("named", "rows", "shapes"),
    [
        ("qkv_proj", [lora("qkv_proj", 14, 2)], SEPARATE),
        ("v_proj", [lora(part, size, 2) for part, size in QKV.items()], FUSED),
    ],
)
def test_no_warning_of_targets_in_another_layout(
    named: str, rows: list[CanonicalRow], shapes: BaseShapes
) -> None:
    config = parse_config(
        json.dumps(
            {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": [named]}
        ).encode()
    )
    assert not [
        text for text in target_warnings(config, fit_modules(rows, shapes), shapes) if named in text
    ]
