"""Adapters of layers with recurrences and convolutions: names, dialects and what is refused."""

import itertools
from pathlib import Path

import numpy as np
import pytest

from loraplex.adapters.base_check import check_shapes
from loraplex.adapters.canonical import CanonicalRow, RowKind
from loraplex.adapters.formats import trtllm
from loraplex.adapters.formats.export import lora_tensors
from loraplex.adapters.formats.modules import hf_modules, module_of
from loraplex.adapters.formats.peft import canonical_rows
from loraplex.adapters.formats.peft_config import PeftConfig
from loraplex.adapters.formats.peft_names import is_of_other_tower, parse_name
from loraplex.adapters.formats.storage_type import StorageType
from loraplex.adapters.fused_modules import fit_modules
from loraplex.adapters.shapes import BaseShapes, LayerShapes
from loraplex.adapters.tensor_file import RawTensor
from loraplex.core.adapter import EMBEDDING
from loraplex.core.errors import (
    AdapterMismatchError,
    InvalidAdapterError,
    UnsupportedFeatureError,
)
from loraplex.core.gguf import GgufFile
from loraplex.core.gguf_names import FAMILIES, HeadLayout, hugging_face_name
from loraplex.core.rank_limits import ModuleKind, RankLimits, kind_of
from support.naming import naming

HIDDEN, KEY, VALUE, HEADS = 8, 4, 6, 2
RANDOM = np.random.default_rng(5)
RANKS = RankLimits(16)
QKV = {"in_proj_q": KEY, "in_proj_k": KEY, "in_proj_v": VALUE}
DELTA = {
    "in_proj_qkv": (HIDDEN, 2 * KEY + VALUE),
    "in_proj_z": (HIDDEN, VALUE),
    "in_proj_b": (HIDDEN, HEADS),
    "in_proj_a": (HIDDEN, HEADS),
    "out_proj": (VALUE, HIDDEN),
}
QWEN35 = BaseShapes(2, DELTA, vocab_size=16, hidden_size=HIDDEN, fused={"in_proj_qkv": QKV})
NEXT = BaseShapes(
    2,
    {
        "in_proj_qkvz": (HIDDEN, 2 * KEY + 2 * VALUE),
        "in_proj_ba": (HIDDEN, 2 * HEADS),
        "out_proj": (VALUE, HIDDEN),
    },
    fused={
        "in_proj_qkvz": {**QKV, "in_proj_z": VALUE},
        "in_proj_ba": {"in_proj_b": HEADS, "in_proj_a": HEADS},
    },
    split_heads={"in_proj_qkvz": HEADS, "in_proj_ba": HEADS},
)


def tensor(*shape: int) -> RawTensor:
    return RawTensor("F32", shape, RANDOM.standard_normal(shape).astype("<f4").tobytes())


def pair(path: str, out: int, num_in: int = HIDDEN, rank: int = 2) -> dict[str, RawTensor]:
    return {
        f"base_model.model.{path}.lora_A.weight": tensor(rank, num_in),
        f"base_model.model.{path}.lora_B.weight": tensor(out, rank),
    }


def rows_of(tensors: dict[str, RawTensor], shapes: BaseShapes = QWEN35) -> tuple[CanonicalRow, ...]:
    rows = fit_modules(canonical_rows(PeftConfig(r=2, lora_alpha=4), tensors, shapes), shapes)
    check_shapes(rows, shapes, max_ranks=RANKS)
    return rows


def deltas(rows: tuple[CanonicalRow, ...]) -> dict[str, np.ndarray]:
    return {
        row.module: row.scale * (row.tensors["b"].array() @ row.tensors["a"].array())
        for row in rows
    }


def product(tensors: dict[str, RawTensor]) -> np.ndarray:
    a, b = (next(t for name, t in tensors.items() if slot in name) for slot in ("_A", "_B"))
    return 2.0 * (b.array() @ a.array())


@pytest.mark.parametrize(
    ("path", "module"),
    [
        ("model.language_model.layers.1.linear_attn.in_proj_qkv", "in_proj_qkv"),
        ("model.layers.1.linear_attn.in_proj_b", "in_proj_b"),
        ("model.language_model.layers.1.linear_attn.out_proj", "out_proj"),
        ("model.layers.1.mamba.in_proj", "in_proj"),
        ("backbone.layers.1.mixer.in_proj", "in_proj"),
        ("backbone.layers.1.mixer.q_proj", "q_proj"),
        ("model.backbone.layers.1.mixer.up_proj", "up_proj"),
        ("model.layers.1.mixer.experts.3.down_proj", "experts.down_proj"),
        ("backbone.layers.1.mixer.gate", "router"),
        ("backbone.layers.1.mixer.shared_experts.up_proj", "shared_expert.up_proj"),
        ("backbone.layers.1.mixer.fc1_latent_proj", "fc1_latent_proj"),
        ("model.layers.1.conv.in_proj", "in_proj"),
        ("model.layers.1.conv.out_proj", "out_proj"),
        ("model.layers.1.feed_forward.w1", "w1"),
    ],
)
def test_modules_of_recurrent_layers_by_their_names(path: str, module: str) -> None:
    found = parse_name(f"base_model.model.{path}.lora_A.weight")
    assert found is not None
    assert (found.layer, found.module) == (1, module)


def test_the_embedding_of_nemotron() -> None:
    found = parse_name("base_model.model.backbone.embeddings.lora_embedding_A")
    assert found is not None
    assert found.module == EMBEDDING


@pytest.mark.parametrize(
    "path",
    [
        "base_model.model.mtp.layers.0.self_attn.q_proj.lora_A.weight",
        "base_model.model.model.mtp.fc.lora_B.weight",
        "base_model.model.model.visual.blocks.0.attn.qkv.lora_A.weight",
        "base_model.model.model.embed_vision.embedding_projection.lora_A.weight",
    ],
)
def test_parts_that_no_text_passes_through_are_known_by_name(path: str) -> None:
    assert is_of_other_tower(path)


@pytest.mark.parametrize("path", ["linear_attn.conv1d", "mamba.conv1d", "conv.conv"])
@pytest.mark.parametrize("root", ["model", "backbone", "model.language_model"])
def test_lora_of_a_convolution_is_refused_by_name(path: str, root: str) -> None:
    whole = pair(f"{root}.layers.0.linear_attn.in_proj_z", VALUE)
    name = f"base_model.model.{root}.layers.0.{path}.lora_A.weight"
    with pytest.raises(
        UnsupportedFeatureError, match=naming(name, "convolution", "exclude_modules")
    ):
        rows_of(whole | {name: tensor(2, HIDDEN, 4)})


# ------------------------------------------------------------------ dialects of the delta rule


def test_separate_inputs_are_those_of_qwen35() -> None:
    parts = [pair(f"model.layers.0.linear_attn.{name}", size[1]) for name, size in DELTA.items()]
    parts[-1] = pair("model.layers.0.linear_attn.out_proj", HIDDEN, VALUE)
    found = deltas(rows_of({k: v for part in parts for k, v in part.items()}))
    for name, part in zip(DELTA, parts, strict=True):
        np.testing.assert_array_equal(found[name], product(part))


@pytest.mark.parametrize(
    "names", [tuple(QKV), ("in_proj_q",), ("in_proj_v", "in_proj_k")], ids="-".join
)
def test_split_inputs_become_one_layer(names: tuple[str, ...]) -> None:
    parts = {name: pair(f"model.layers.0.linear_attn.{name}", QKV[name]) for name in names}
    z = pair("model.layers.0.linear_attn.in_proj_z", VALUE)
    found = deltas(rows_of({k: v for part in (*parts.values(), z) for k, v in part.items()}))
    whole = [
        product(parts[name]) if name in parts else np.zeros((size, HIDDEN))
        for name, size in QKV.items()
    ]
    np.testing.assert_allclose(found["in_proj_qkv"], np.concatenate(whole), rtol=1e-6)
    np.testing.assert_array_equal(found["in_proj_z"], product(z))


def test_fused_inputs_share_their_a() -> None:
    qkvz = pair("model.layers.0.linear_attn.in_proj_qkvz", 2 * KEY + 2 * VALUE)
    ba = pair("model.layers.0.linear_attn.in_proj_ba", 2 * HEADS)
    rows = rows_of(qkvz | ba)
    found = deltas(rows)
    whole = np.concatenate([found["in_proj_qkv"], found["in_proj_z"]])
    np.testing.assert_array_equal(whole, product(qkvz))
    np.testing.assert_array_equal(
        np.concatenate([found["in_proj_b"], found["in_proj_a"]]), product(ba)
    )
    assert [row.origin.rpartition(".")[2] for row in rows] == [row.module for row in rows]


def test_the_fused_inputs_of_qwen3_next_stay_in_their_order() -> None:
    qkvz = pair("model.layers.0.linear_attn.in_proj_qkvz", 2 * KEY + 2 * VALUE)
    ba = pair("model.layers.0.linear_attn.in_proj_ba", 2 * HEADS)
    found = deltas(rows_of(qkvz | ba, NEXT))
    np.testing.assert_array_equal(found["in_proj_qkvz"], product(qkvz))
    np.testing.assert_array_equal(found["in_proj_ba"], product(ba))


@pytest.mark.parametrize(
    ("whole", "sizes", "given"),
    [
        ("in_proj_qkvz", {**QKV, "in_proj_z": VALUE}, [*QKV, "in_proj_z"]),
        ("in_proj_qkvz", {**QKV, "in_proj_z": VALUE}, ["in_proj_v"]),
        ("in_proj_ba", {"in_proj_b": HEADS, "in_proj_a": HEADS}, ["in_proj_a", "in_proj_b"]),
    ],
    ids=["all inputs", "values", "gates"],
)
def test_split_inputs_become_the_layer_of_qwen3_next(
    whole: str, sizes: dict[str, int], given: list[str]
) -> None:
    """The layer has the rows of the first head of every part, then those of the second."""
    parts = {name: pair(f"model.layers.0.linear_attn.{name}", sizes[name]) for name in given}
    found = deltas(rows_of({k: v for part in parts.values() for k, v in part.items()}, NEXT))
    assert set(found) == {whole}
    products = {
        name: product(parts[name]) if name in parts else np.zeros((size, HIDDEN))
        for name, size in sizes.items()
    }
    expected = [
        products[name][head * size // HEADS : (head + 1) * size // HEADS]
        for head in range(HEADS)
        for name, size in sizes.items()
    ]
    np.testing.assert_allclose(found[whole], np.concatenate(expected), rtol=1e-6)


def test_dora_of_the_gates_of_qwen3_next() -> None:
    config = PeftConfig(r=2, lora_alpha=4, use_dora=True)
    tensors: dict[str, RawTensor] = {}
    for name in ("in_proj_b", "in_proj_a"):
        path = f"model.layers.0.linear_attn.{name}"
        tensors |= pair(path, HEADS)
        tensors[f"base_model.model.{path}.lora_magnitude_vector"] = tensor(HEADS)
    rows = fit_modules(canonical_rows(config, tensors, NEXT), NEXT)
    (magnitude,) = (row for row in rows if row.kind is RowKind.MAGNITUDE)
    (found,) = (each.array() for each in magnitude.tensors.values())
    b, a = (
        tensors[f"base_model.model.model.layers.0.linear_attn.{name}.lora_magnitude_vector"].array()
        for name in ("in_proj_b", "in_proj_a")
    )
    np.testing.assert_array_equal(found, [b[0], a[0], b[1], a[1]])


def test_what_qwen3_next_has_in_another_order_is_refused_by_name() -> None:
    path = "model.layers.0.linear_attn.in_proj_qkv"
    with pytest.raises(AdapterMismatchError, match=naming("in_proj_qkv")):
        rows_of(pair(path, 2 * KEY + VALUE), NEXT)


def test_two_dialects_of_one_layer_contradict_each_other() -> None:
    path = "model.layers.0.linear_attn"
    both = pair(f"{path}.in_proj_q", KEY) | pair(f"{path}.in_proj_qkv", 2 * KEY + VALUE)
    with pytest.raises(
        AdapterMismatchError, match=naming(f"{path}.in_proj_q", f"{path}.in_proj_qkv")
    ):
        rows_of(both)


def test_dora_of_split_inputs() -> None:
    config = PeftConfig(r=2, lora_alpha=4, use_dora=True)
    tensors: dict[str, RawTensor] = {}
    for name, size in QKV.items():
        path = f"model.layers.0.linear_attn.{name}"
        tensors |= pair(path, size)
        tensors[f"base_model.model.{path}.lora_magnitude_vector"] = tensor(size)
    rows = fit_modules(canonical_rows(config, tensors, QWEN35), QWEN35)
    check_shapes(rows, QWEN35, max_ranks=RANKS)
    (magnitude,) = (row for row in rows if row.kind is RowKind.MAGNITUDE)
    vectors = [t.array() for name, t in tensors.items() if "magnitude" in name]
    np.testing.assert_array_equal(magnitude.tensors["magnitude"].array(), np.concatenate(vectors))


# ------------------------------------------------------------------ experts without a gate

EXPERTS = {"experts.up_proj": (HIDDEN, 6), "experts.down_proj": (6, HIDDEN)}
UNGATED = BaseShapes(2, EXPERTS, num_experts=dict.fromkeys(EXPERTS, 3))


def tinker(num_experts: int) -> dict[str, RawTensor]:
    path = "base_model.model.backbone.layers.0.mixer.experts"
    shapes = {
        "w1": ((1, 2, HIDDEN), (num_experts, 6, 2)),
        "w2": ((num_experts, 2, 6), (1, HIDDEN, 2)),
        "w3": ((1, 2, 0), (num_experts, 0, 2)),
    }
    return {
        f"{path}.{name}.lora_{slot}.weight": tensor(*shape)
        for name, both in shapes.items()
        for slot, shape in zip("AB", both, strict=True)
    }


def test_an_empty_w3_makes_w1_the_one_input_of_experts() -> None:
    tensors = tinker(3)
    rows = canonical_rows(PeftConfig(r=2, lora_alpha=4), tensors, UNGATED)
    assert {(row.module, row.expert) for row in rows} == set(itertools.product(EXPERTS, range(3)))
    b = next(t for name, t in tensors.items() if "w1.lora_B" in name)
    for row in rows:
        if row.module == "experts.up_proj":
            np.testing.assert_array_equal(row.tensors["b"].array(), b.array()[row.expert])


def test_an_empty_w3_of_single_experts() -> None:
    path = "backbone.layers.0.mixer.experts.1"
    tensors = pair(f"{path}.w1", 6) | pair(f"{path}.w2", HIDDEN, 6)
    tensors |= {
        f"base_model.model.{path}.w3.lora_A.weight": tensor(2, 0),
        f"base_model.model.{path}.w3.lora_B.weight": tensor(0, 2),
    }
    rows = canonical_rows(PeftConfig(r=2, lora_alpha=4), tensors, UNGATED)
    assert [(row.module, row.expert) for row in rows] == [
        ("experts.down_proj", 1),
        ("experts.up_proj", 1),
    ]


def test_an_empty_w3_of_experts_with_a_gate_is_refused() -> None:
    gated = EXPERTS | {"experts.gate_proj": (HIDDEN, 6)}
    shapes = BaseShapes(2, gated, num_experts=dict.fromkeys(gated, 3))
    with pytest.raises(InvalidAdapterError, match=r"w3\.lora_A.*empty"):
        canonical_rows(PeftConfig(r=2, lora_alpha=4), tinker(3), shapes)


# ------------------------------------------------------------------ TensorRT-LLM's ids

MAMBA = {"in_proj": (HIDDEN, 10), "out_proj": (6, HIDDEN)}
ATTENTION = {"q_proj": (HIDDEN, 6), "k_proj": (HIDDEN, 2), "v_proj": (HIDDEN, 2)}
LATENT = {"fc1_latent_proj": (HIDDEN, 4), "fc2_latent_proj": (4, HIDDEN)}
HYBRID = BaseShapes(
    3,
    MAMBA | ATTENTION | LATENT,
    module_layers=dict.fromkeys(MAMBA, (0, 1)) | dict.fromkeys(ATTENTION | LATENT, (1,)),
    own_layers={1: LayerShapes(ATTENTION | LATENT | {"out_proj": (6, HIDDEN)})},
    paths={name: f"model.layers.{{}}.mixer.{name}" for name in MAMBA | ATTENTION | LATENT},
)
"""Layer 0 has a recurrence, layer 1 attention whose output layer has the same name."""


def read_trt(module_id: int, layer: int, num_in: int, out: int) -> tuple[CanonicalRow, ...]:
    weights = tensor(1, 2 * (num_in + out))
    config = RawTensor("I32", (1, 3), np.array([[module_id, layer, 2]], "<i4").tobytes())
    return trtllm.canonical_rows(weights, config, HYBRID, RANKS)


@pytest.mark.parametrize(
    ("module_id", "layer", "module"),
    [
        (22, 0, "in_proj"),
        (23, 0, "out_proj"),
        (4, 1, "out_proj"),
        (24, 1, "fc1_latent_proj"),
        (25, 1, "fc2_latent_proj"),
    ],
)
def test_ids_of_tensorrt_llm_in_and_out(module_id: int, layer: int, module: str) -> None:
    sizes = HYBRID.layer(layer).modules[module]
    (row,) = read_trt(module_id, layer, *sizes)
    assert (row.layer, row.module) == (layer, module)
    parent = "self_attn" if module_id == 4 else "mixer"
    origin = f"model.layers.{layer}.{parent}.{module}"
    written = CanonicalRow(layer, module, None, row.kind, 1.0, row.tensors, origin)
    _, config = lora_tensors([written], StorageType.FLOAT32)
    assert np.frombuffer(config.data, "<i4")[:3].tolist() == [module_id, layer, 2]


@pytest.mark.parametrize(("module_id", "layer"), [(4, 0), (22, 1), (23, 1)])
def test_an_id_of_another_mixer_is_refused(module_id: int, layer: int) -> None:
    with pytest.raises(AdapterMismatchError, match=naming("not enabled", layer)):
        read_trt(module_id, layer, 6, HIDDEN)


def test_delta_rules_have_no_id() -> None:
    assert module_of("linear_attn", "out_proj") is None
    assert module_of("linear_attn", "in_proj_qkv") is None


def test_names_of_tensorrt_llm_enable_the_mixer() -> None:
    assert hf_modules(["mamba_in_proj", "mamba_out_proj"], tuple(MAMBA)) == tuple(MAMBA)
    assert hf_modules(["out_proj"], tuple(DELTA)) == ("out_proj",)


@pytest.mark.parametrize("module", [*MAMBA, *DELTA, *QKV, "in_proj_qkvz", "in_proj_ba", "g_proj"])
def test_mixers_have_the_ranks_of_attention(module: str) -> None:
    assert kind_of(module) is ModuleKind.ATTENTION


# ------------------------------------------------------------------ GGUF's order of value heads

VALUES_PER_KEY, VALUE_SIZE, KEY_SIZE = 3, 5, 4
NUM_KEYS = 2
NUM_VALUES = NUM_KEYS * VALUES_PER_KEY
LAYOUT = HeadLayout(KEY_SIZE, NUM_KEYS, NUM_VALUES, VALUE_SIZE)


def in_files(numbers: np.ndarray, axis: int, size: int) -> np.ndarray:
    """Reorder as llama.cpp's converter does."""
    before, behind = numbers.shape[:axis], numbers.shape[axis + 1 :]
    shape = (*before, NUM_KEYS, VALUES_PER_KEY, size, *behind)
    return numbers.reshape(shape).swapaxes(axis, axis + 1).reshape(numbers.shape)


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("in_proj_z.weight", VALUE_SIZE),
        ("in_proj_b.weight", 1),
        ("in_proj_a.weight", 1),
        ("A_log", 1),
        ("dt_bias", 1),
    ],
)
def test_rows_of_files_are_those_of_hugging_face(name: str, size: int) -> None:
    rows = np.arange(NUM_VALUES * size)
    family = FAMILIES["qwen35"]
    order = family.file_rows(f"model.layers.0.linear_attn.{name}", len(rows), LAYOUT)
    np.testing.assert_array_equal(in_files(rows, 0, size)[order], rows)
    assert family.file_columns(f"model.layers.0.linear_attn.{name}", LAYOUT) is None


@pytest.mark.parametrize("name", ["in_proj_qkv.weight", "conv1d.weight"])
def test_rows_of_keys_stay_where_they_are(name: str) -> None:
    keys = 2 * NUM_KEYS * KEY_SIZE
    rows = np.arange(keys + NUM_VALUES * VALUE_SIZE)
    stored = np.concatenate((rows[:keys], in_files(rows[keys:], 0, VALUE_SIZE)))
    name = f"model.layers.0.linear_attn.{name}"
    order = FAMILIES["qwen35"].file_rows(name, len(rows), LAYOUT)
    np.testing.assert_array_equal(stored[order], rows)


def test_columns_of_files_are_those_of_hugging_face() -> None:
    weight = RANDOM.standard_normal((3, NUM_VALUES * VALUE_SIZE))
    name = "model.layers.0.linear_attn.out_proj.weight"
    family = FAMILIES["qwen35"]
    order = family.file_columns(name, LAYOUT)
    np.testing.assert_array_equal(in_files(weight, 1, VALUE_SIZE)[:, order], weight)
    assert family.file_rows(name, len(weight), LAYOUT) is None


def test_one_value_for_each_key_has_one_order() -> None:
    family, heads = FAMILIES["qwen35"], HeadLayout(KEY_SIZE, 2, 2, VALUE_SIZE)
    for name in ("in_proj_z.weight", "in_proj_qkv.weight", "A_log"):
        assert family.file_rows(f"model.layers.0.linear_attn.{name}", 10, heads) is None
    assert family.file_columns("model.layers.0.linear_attn.out_proj.weight", heads) is None


def test_norms_but_those_of_delta_rules_are_shifted() -> None:
    family = FAMILIES["qwen35"]
    assert family.norm_shift("model.layers.0.input_layernorm.weight") == -1
    assert family.norm_shift("model.layers.3.self_attn.q_norm.weight") == -1
    assert family.norm_shift("model.norm.weight") == -1
    assert family.norm_shift("model.layers.0.linear_attn.norm.weight") == 0
    assert family.norm_shift("model.layers.0.mlp.up_proj.weight") == 0


@pytest.mark.parametrize(
    ("tensor", "module"),
    [
        ("blk.1.ssm_in.weight", "in_proj"),
        ("blk.1.ssm_out.weight", "out_proj"),
        ("blk.1.ffn_gate.weight", "shared_expert.gate_proj"),
        ("blk.1.ffn_up_shexp.weight", "shared_expert.up_proj"),
        ("blk.1.ffn_down.weight", "shared_expert.down_proj"),
        ("blk.1.ffn_gate_inp.weight", "router"),
        ("blk.1.attn_output.weight", "o_proj"),
    ],
)
def test_weights_of_granites_gguf_adapters(tensor: str, module: str) -> None:
    file = GgufFile(Path("a.gguf"), {"general.architecture": "granitehybrid"}, {})
    name = hugging_face_name(file, tensor)
    assert name is not None
    found = parse_name(name)
    assert found is not None
    assert (found.layer, found.module) == (1, module)
