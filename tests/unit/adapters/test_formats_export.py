"""Exports: what comes back is what went in, bit for bit where the format can hold it."""

import dataclasses
import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from loraplex.adapters.canonical import CanonicalRow, RowKind, digest
from loraplex.adapters.formats.export import StorageType, common_storage_type, lora_tensors
from loraplex.adapters.formats.export_peft import peft_config, peft_tensors
from loraplex.adapters.formats.peft import canonical_rows as read_peft
from loraplex.adapters.formats.peft_config import parse_config
from loraplex.adapters.formats.trtllm import canonical_rows as read_pair
from loraplex.adapters.shapes import BaseShapes
from loraplex.adapters.tensor_file import RawTensor
from loraplex.core.errors import (
    InvalidAdapterError,
    InvalidParameterError,
    UnsupportedFeatureError,
)
from loraplex.core.rank_limits import RankLimits
from support.examples import examples
from support.naming import naming

LIMITS = RankLimits(8)

SHAPES = BaseShapes(
    3,
    {
        "q_proj": (8, 12),
        "k_proj": (8, 4),
        "v_proj": (8, 4),
        "o_proj": (12, 8),
        "gate_proj": (8, 10),
        "up_proj": (8, 10),
        "down_proj": (10, 8),
    },
)
IDS = {"q_proj": 1, "k_proj": 2, "v_proj": 3, "o_proj": 4, "gate_proj": 5, "down_proj": 6,
       "up_proj": 7}  # fmt: skip
NUMPY_TYPES = {"F32": "<f4", "F16": "<f2"}


def tensor(values, dtype="F32") -> RawTensor:
    array = np.asarray(values, "<f4")
    if dtype == "BF16":
        bits = torch.from_numpy(array.copy()).to(torch.bfloat16).view(torch.int16).numpy()
        return RawTensor(dtype, array.shape, bits.tobytes())
    return RawTensor(dtype, array.shape, array.astype(NUMPY_TYPES[dtype]).tobytes())


def lora(module, layer=0, rank=2, scale=1.0, dtype="F32", seed=0, **kwargs) -> CanonicalRow:
    rng = np.random.default_rng([seed, layer, len(module)])
    num_in, num_out = kwargs.pop("shape", None) or SHAPES.modules[module]
    parent = "self_attn" if module in ("q_proj", "k_proj", "v_proj", "o_proj") else "mlp"
    fields = {
        "kind": RowKind.LORA,
        "expert": None,
        "origin": f"model.layers.{layer}.{parent}.{module}",
        "tensors": {
            "a": tensor(rng.normal(size=(rank, num_in)), dtype),
            "b": tensor(rng.normal(size=(num_out, rank)), dtype),
        },
    }
    return CanonicalRow(
        layer=layer, module=module, scale=float(np.float32(scale)), **fields | kwargs
    )


def config_of(rows) -> list[list[int]]:
    config = lora_tensors(rows, StorageType.FLOAT32)[1]
    return np.ndarray(config.shape, "<i4", config.data)[0].tolist()


@st.composite
def adapters(draw, scales):
    places = draw(
        st.lists(
            st.tuples(st.sampled_from(sorted(SHAPES.modules)), st.integers(0, 2)),
            min_size=1,
            unique=True,
        )
    )
    dtype, seed = draw(st.sampled_from(["F32", "F16", "BF16"])), draw(st.integers(0, 2**16))
    return [
        lora(module, layer, draw(st.integers(1, 5)), draw(scales), dtype, seed)
        for module, layer in places
    ]


class TestThePair:
    @examples(0.5)
    @given(adapters(st.just(1.0)))
    def test_without_a_scale_it_comes_back_bit_for_bit(self, rows):
        weights, config = lora_tensors(rows, common_storage_type(rows))
        assert digest(read_pair(weights, config, SHAPES, LIMITS)) == digest(rows)

    @examples(0.5)
    @given(adapters(st.sampled_from([0.5, 2.0, 4.0])), st.sampled_from(list(StorageType)))
    def test_a_scale_of_two_s_powers_and_a_wide_enough_type_lose_nothing(self, rows, storage):
        source = rows[0].tensors["a"].dtype
        if storage is not StorageType.FLOAT32 and storage is not common_storage_type(rows):
            storage = StorageType.FLOAT32
        weights, config = lora_tensors(rows, storage)
        back = {(row.layer, row.module): row for row in read_pair(weights, config, SHAPES, LIMITS)}
        assert len(back) == len(rows)
        for row in rows:
            got = back[row.layer, row.module]
            assert got.scale == 1.0
            a, b = (row.tensors[name].array().astype("f8") for name in "ab")
            np.testing.assert_array_equal(got.tensors["a"].array(), a, err_msg=source)
            np.testing.assert_array_equal(got.tensors["b"].array(), b * row.scale)

    def test_the_scale_is_in_b_only_in_float32_and_rounded_once(self):
        row = lora("q_proj", scale=1 / 3, dtype="F16")
        weights, _ = lora_tensors([row], StorageType.FLOAT16)
        stored = np.ndarray(weights.shape, "<f2", weights.data)[0, 0]
        b = row.tensors["b"].array().astype("<f4") * np.float32(1 / 3)
        np.testing.assert_array_equal(stored[:16], row.tensors["a"].array().ravel())
        np.testing.assert_array_equal(stored[16:], b.astype("<f2").ravel())
        assert (stored[16:] != (row.tensors["b"].array() * np.float16(1 / 3)).ravel()).any()

    @pytest.mark.parametrize("storage", list(StorageType))
    def test_rounding_is_torch_s(self, storage):
        values = np.concatenate(
            [
                np.float32([1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-11, 1e-8, -1e-40, 0.0, -0.0, 60000]),
                np.random.default_rng(0).normal(size=8192 - 8).astype("<f4"),
            ]
        )
        tensors = {"a": tensor(values.reshape(1, -1)), "b": tensor([[1.0]])}
        row = lora("q_proj", tensors=tensors)
        weights, _ = lora_tensors([row], storage)
        expected = torch.from_numpy(values).to(getattr(torch, storage.value))
        bits = expected.view(torch.int32 if storage is StorageType.FLOAT32 else torch.int16)
        assert bytes(weights.data)[: -weights.item_bytes] == bits.numpy().tobytes()

    def test_rows_are_sorted_and_padded_with_zeros(self):
        rows = [lora("up_proj", 1, 3), lora("v_proj", 1, 1), lora("down_proj", 0, 2)]
        assert config_of(rows) == [[6, 0, 2], [3, 1, 1], [7, 1, 3]]
        weights, config = lora_tensors(rows, StorageType.FLOAT32)
        assert (weights.shape, config.shape) == ((1, 3, 3 * 18), (1, 3, 3))
        assert not np.ndarray(weights.shape, "<f4", weights.data)[0, 1, 12:].any()

    @pytest.mark.parametrize(("module", "module_id"), IDS.items())
    def test_module_ids(self, module, module_id):
        assert config_of([lora(module)]) == [[module_id, 0, 2]]

    @pytest.mark.parametrize(
        ("path", "module_id"),
        [
            *[("self_attn.dense", 4), ("self_attn.qkv_proj", 0), ("self_attn.W_pack", 0)],
            *[("self_attention.dense", 4), ("attention.dense", 4), ("attention.wo", 4)],
            *[("self_attn.out_proj", 4), ("attn.out_proj", 4)],
            *[("mlp.c_fc", 5), ("mlp.fc1", 5), ("fc1", 5), ("mlp.fc_in", 5)],
            *[("mlp.dense_h_to_4h", 5), ("feed_forward.w1", 5), ("feed_forward.w3", 7)],
            *[("mlp.c_proj", 6), ("mlp.fc2", 6), ("fc2", 6), ("mlp.fc_out", 6)],
            *[("mlp.dense_4h_to_h", 6), ("feed_forward.w2", 6)],
        ],
    )
    def test_module_ids_of_other_families(self, path, module_id):
        module = path.rpartition(".")[2]
        row = lora(module, shape=(8, 20), origin=f"model.decoder.layers.0.{path}")
        assert config_of([row]) == [[module_id, 0, 2]]

    def test_fused_projections_split_as_they_were(self):
        """qkv_proj is (q, k, v); gate_up_proj is (gate, up) and is stored the other way round."""
        qkv = lora("qkv_proj", shape=(8, 20), origin="model.layers.0.self_attn.qkv_proj")
        gate_up = lora("gate_up_proj", shape=(8, 20))
        assert config_of([qkv, gate_up]) == [[0, 0, 2], [18, 0, 2]]
        back = read_pair(*lora_tensors([qkv, gate_up], StorageType.FLOAT32), SHAPES, LIMITS)
        found = {row.module: row.tensors["b"].array() for row in back}
        np.testing.assert_array_equal(
            np.concatenate([found["q_proj"], found["k_proj"], found["v_proj"]]),
            qkv.tensors["b"].array(),
        )
        np.testing.assert_array_equal(
            np.concatenate([found["gate_proj"], found["up_proj"]]), gate_up.tensors["b"].array()
        )


class TestRefusals:
    def test_all_that_have_no_module_are_named(self):
        rows = [
            lora("q_proj"),
            lora(
                "query_key_value", shape=(8, 20), origin="model.layers.0.self_attn.query_key_value"
            ),
            lora("c_proj", 1, shape=(8, 20), origin="model.layers.1.self_attn.c_proj"),
        ]
        with pytest.raises(UnsupportedFeatureError) as raised:
            lora_tensors(rows, StorageType.FLOAT16)
        assert "model.layers.0.self_attn.query_key_value" in raised.value.message
        assert "model.layers.1.self_attn.c_proj" in raised.value.message
        assert "q_proj," not in raised.value.message

    @pytest.mark.parametrize("change", [{"kind": RowKind.MAGNITUDE}, {"expert": 3}])
    def test_every_row_that_is_no_plain_lora_is_named(self, change):
        rows = [lora("q_proj"), lora("k_proj", **change), lora("v_proj", **change)]
        with pytest.raises(UnsupportedFeatureError) as raised:
            lora_tensors(rows, StorageType.FLOAT16)
        for name in ("k_proj", "v_proj"):
            assert f"self_attn.{name} (" in raised.value.message
        assert "q_proj" not in raised.value.message

    def test_a_bias_of_lora_b_is_never_dropped(self):
        row = lora("q_proj")
        bias = RawTensor("F32", (12,), bytes(48))
        biased = dataclasses.replace(row, tensors={**row.tensors, "bias": bias})
        with pytest.raises(UnsupportedFeatureError, match="a, b, bias"):
            lora_tensors([biased], StorageType.FLOAT16)

    def test_peft_has_no_experts_here(self):
        for export in (peft_tensors, peft_config):
            with pytest.raises(UnsupportedFeatureError, match="expert 3"):
                export([lora("q_proj", expert=3)])

    def test_two_rows_for_one_place(self):
        rows = [lora("o_proj"), lora("dense", shape=(8, 8), origin="layers.0.self_attn.dense")]
        with pytest.raises(
            UnsupportedFeatureError, match=naming("attn_dense", 0, "layers.0.self_attn.dense")
        ):
            lora_tensors(rows, StorageType.FLOAT16)

    @pytest.mark.parametrize(
        ("value", "scale", "storage", "fits"),
        [
            (65504.0, 1.0, StorageType.FLOAT16, True),
            (65520.0, 1.0, StorageType.FLOAT16, False),
            (40000.0, 2.0, StorageType.FLOAT16, False),
            (40000.0, 2.0, StorageType.BFLOAT16, True),
            (3.4e38, 1.0, StorageType.BFLOAT16, False),
            (3e38, 2.0, StorageType.FLOAT32, False),
        ],
    )
    def test_values_that_are_too_large(self, value, scale, storage, fits):
        tensors = {"a": tensor([[1.0] * 8]), "b": tensor([[value]] * 12)}
        row = lora("q_proj", scale=scale, tensors=tensors)
        if fits:
            assert lora_tensors([row], storage)
            return
        with pytest.raises(
            InvalidAdapterError, match=naming("model.layers.0.self_attn.q_proj", storage)
        ):
            lora_tensors([row], storage)

    def test_mixed_types_have_no_common_one(self):
        rows = [lora("q_proj", dtype="F16"), lora("k_proj", dtype="BF16")]
        with pytest.raises(InvalidParameterError, match=naming("BF16", "F16", "float32")):
            common_storage_type(rows)

    def test_nothing_to_export(self):
        for export in (peft_config, lambda rows: lora_tensors(rows, StorageType.FLOAT16)):
            with pytest.raises(InvalidAdapterError, match=naming("rows")):
                export([])


class TestPeft:
    @examples(0.8)
    @given(adapters(st.floats(-16, 16, width=32).map(lambda scale: scale + 0.0)))  # never -0.0
    def test_it_comes_back_bit_for_bit(self, rows):
        config = parse_config(json.dumps(peft_config(rows)).encode())
        assert digest(read_peft(config, peft_tensors(rows))) == digest(rows)

    def test_the_config_reads_as_one_that_a_person_wrote(self):
        rows = [lora(m, layer, 8, 2.0) for m in ("q_proj", "v_proj") for layer in range(3)]
        config = peft_config(rows, "meta/llama")
        assert (config["r"], config["lora_alpha"]) == (8, 16)
        assert isinstance(config["lora_alpha"], int)
        assert config["target_modules"] == ["q_proj", "v_proj"]
        assert config["rank_pattern"] == config["alpha_pattern"] == {}
        assert config["base_model_name_or_path"] == "meta/llama"

    def test_what_differs_is_a_pattern_and_a_gap_makes_paths(self):
        rows = [lora("q_proj", 0, 4, 2.0), lora("k_proj", 0, 4, 2.0), lora("q_proj", 2, 2, 0.1)]
        config = peft_config(rows)
        assert config["rank_pattern"] == {"model.layers.2.self_attn.q_proj": 2}
        assert list(config["alpha_pattern"]) == ["model.layers.2.self_attn.q_proj"]
        assert config["target_modules"] == [
            "model.layers.0.self_attn.k_proj",
            "model.layers.0.self_attn.q_proj",
            "model.layers.2.self_attn.q_proj",
        ]


def expert(
    number: int | None, module="experts.gate_proj", path="mlp.experts.{}.gate_proj", layer=0
):
    origin = f"model.layers.{layer}.{path.format(number)}"
    return lora(module, layer, 2, expert=number, origin=origin, shape=(8, 6))

    @pytest.mark.parametrize("root", ["", "model.", "model.language_model."])
    def test_what_makes_the_own_inputs_of_layers(self, root):
        module = "per_layer_model_projection"
        rows = [lora("q_proj"), lora(module, shape=(8, 6), origin=root + module)]
        tensors = peft_tensors(rows)
        names = [name for name in tensors if module in name]
        path = f"base_model.model.{root or 'model.'}{module}"
        assert names == [f"{path}.lora_A.weight", f"{path}.lora_B.weight"]
        config = parse_config(json.dumps(peft_config(rows)).encode())
        read = read_peft(config, tensors)
        assert digest(read) == digest(rows)


class TestPeftOfExperts:
    def test_names_are_those_of_the_base(self):
        path = "block_sparse_moe.experts.{}.w1"
        rows = [expert(number, path=path) for number in range(2)]
        names = {name.removesuffix(".weight").rpartition(".")[0] for name in peft_tensors(rows)}
        prefix = "base_model.model.model.layers.0.block_sparse_moe.experts"
        assert names == {f"{prefix}.0.w1", f"{prefix}.1.w1"}
        assert peft_config(rows)["target_modules"] == ["w1"]

    @pytest.mark.parametrize("origin", ["model.layers.0.mlp.experts", ""])
    def test_a_row_that_came_from_all_experts_gets_a_name_of_its_own(self, origin):
        rows = [dataclasses.replace(expert(number), origin=origin) for number in range(2)]
        assert set(peft_tensors(rows)) == {
            f"base_model.model.model.layers.0.mlp.experts.{number}.gate_proj.lora_{slot}.weight"
            for number in range(2)
            for slot in "AB"
        }

    def test_targets_of_a_model_whose_first_layer_is_dense(self):
        """Names where each layer with experts, and each expert, has the module; else paths."""
        rows = [
            *(lora("q_proj", layer) for layer in range(3)),
            *(expert(number, layer=layer) for layer in (1, 2) for number in range(2)),
            *(expert(None, "router", "mlp.gate", layer) for layer in (1, 2)),
            *(
                expert(None, "shared_expert.up_proj", "mlp.shared_expert.up_proj", layer)
                for layer in (1, 2)
            ),
        ]
        assert peft_config(rows)["target_modules"] == [
            *("gate", "gate_proj", "q_proj", "shared_expert.up_proj"),
        ]
        few = [row for row in rows if (row.layer, row.expert) != (2, 1)]
        assert "model.layers.1.mlp.experts.1.gate_proj" in peft_config(few)["target_modules"]
        for made in (rows, few):
            config = parse_config(json.dumps(peft_config(made)).encode())
            assert digest(read_peft(config, peft_tensors(made))) == digest(made)


@examples(0.4)
@given(adapters(st.sampled_from([0.25, 1.0, 2.0])))
def test_peft_pair_canonical_peft(rows):
    """The whole circle: A bit for bit, B with its scale, and the same change of every layer."""
    config = parse_config(json.dumps(peft_config(rows)).encode())
    first = read_peft(config, peft_tensors(rows))
    pair = lora_tensors(first, StorageType.FLOAT32)
    second = read_pair(*pair, SHAPES, LIMITS)
    back_config = parse_config(json.dumps(peft_config(second)).encode())
    third = read_peft(back_config, peft_tensors(second))
    assert digest(third) == digest(second)
    for before, after in zip(first, third, strict=True):
        assert (before.layer, before.module) == (after.layer, after.module)
        a, b = (before.tensors[name].array().astype("<f4") for name in "ab")
        np.testing.assert_array_equal(after.tensors["a"].array(), a)
        np.testing.assert_array_equal(
            after.tensors["b"].array() * after.scale, b * np.float32(before.scale)
        )
