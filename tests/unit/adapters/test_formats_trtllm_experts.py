"""TensorRT-LLM's tensors of layers with experts: ids 13 to 17 and 19 to 21, in and out."""

import dataclasses

import msgspec
import numpy as np
import pytest

from loraplex.adapters.canonical import CanonicalRow, RowKind, digest
from loraplex.adapters.formats.export import StorageType, count_experts, lora_tensors
from loraplex.adapters.formats.modules import hf_modules
from loraplex.adapters.formats.trtllm import canonical_rows
from loraplex.adapters.fused_modules import fit_modules
from loraplex.adapters.shapes import BaseShapes
from loraplex.adapters.tensor_file import RawTensor
from loraplex.core.errors import (
    AdapterMismatchError,
    ConfigError,
    InvalidAdapterError,
    UnsupportedFeatureError,
)
from loraplex.core.rank_limits import RankLimits
from support.naming import naming

E = 3
DENSE = {"gate_proj": (8, 10), "up_proj": (8, 10), "down_proj": (10, 8)}
EXPERTS = {"experts.gate_proj": (8, 6), "experts.up_proj": (8, 6), "experts.down_proj": (6, 8)}
SHARED = {
    "shared_expert.gate_proj": (8, 12),
    "shared_expert.up_proj": (8, 12),
    "shared_expert.down_proj": (12, 8),
}
ROUTERS = {"router": (8, E), "shared_expert_gate": (8, 1)}
BASE = BaseShapes(
    3,
    {"q_proj": (8, 8)} | DENSE | EXPERTS | SHARED | ROUTERS,
    num_experts=dict.fromkeys(EXPERTS, E),
    module_layers=dict.fromkeys(DENSE, (0,)) | dict.fromkeys(EXPERTS | SHARED | ROUTERS, (1, 2)),
)
"""A Qwen2-MoE whose first layer is dense."""
IDS = {
    "experts.gate_proj": 13,
    "experts.down_proj": 14,
    "experts.up_proj": 15,
    "router": 16,
    "shared_expert_gate": 17,
    "shared_expert.gate_proj": 19,
    "shared_expert.down_proj": 20,
    "shared_expert.up_proj": 21,
}
GATE, ROUTER = IDS["experts.gate_proj"], IDS["router"]


def read(weights, config, shapes=BASE, dtype="F32") -> tuple[CanonicalRow, ...]:
    weights, config = np.asarray(weights), np.asarray(config, "<i4")
    if weights.dtype == np.float64:
        weights = weights.astype("<f4")
    return canonical_rows(
        RawTensor(dtype, weights.shape, weights.tobytes()),
        RawTensor("I32", config.shape, config.tobytes()),
        shapes,
        RankLimits(8),
    )


def stacked(rank: int = 2, module: str = "experts.gate_proj", num_experts: int = E):
    """(A [E, rank, in], B [E, out, rank]) without zeros."""
    num_in, num_out = BASE.modules[module]
    a = 1 + np.arange(num_experts * rank * num_in, dtype="<f4").reshape(num_experts, rank, num_in)
    b = -1 - np.arange(num_experts * num_out * rank, dtype="<f4")
    return a, b.reshape(num_experts, num_out, rank)


def flat(*arrays: np.ndarray) -> np.ndarray:
    return np.concatenate([array.ravel() for array in arrays])


def random_tensors(num_in: int, num_out: int, rank=2, seed=0) -> dict[str, RawTensor]:
    rng = np.random.default_rng(seed)
    return {
        name: RawTensor("F32", shape, rng.standard_normal(shape).astype("<f4").tobytes())
        for name, shape in (("a", (rank, num_in)), ("b", (num_out, rank)))
    }


def lora(module: str, layer: int = 1, expert: int | None = None, rank=2, scale=1.0) -> CanonicalRow:
    tensors = random_tensors(*BASE.modules[module], rank, [layer, expert or 0, IDS[module]])
    path = f"model.layers.{layer}.mlp.{module.replace('experts.', f'experts.{expert}.')}"
    path = path.replace("mlp.router", "mlp.gate")
    return CanonicalRow(layer, module, expert, RowKind.LORA, scale, tensors, path)


class TestRows:
    def test_value_by_value(self):
        """A of expert 0, 1, 2, then B of expert 0, 1, 2."""
        count = E * 2 * (8 + 6)
        rows = read([1000.0 + np.arange(count)], [[GATE, 1, 2]])
        assert [(row.layer, row.module, row.expert) for row in rows] == [
            (1, "experts.gate_proj", expert) for expert in range(E)
        ]
        for expert, row in enumerate(rows):
            for i in range(2):
                for j in range(8):
                    value = 1000 + 16 * expert + 8 * i + j
                    assert row.tensors["a"].array()[i, j] == value
                for j in range(6):
                    value = 1000 + E * 16 + 12 * expert + 2 * j + i
                    assert row.tensors["b"].array()[j, i] == value
            assert row.origin == f"model.layers.1.mlp.experts.{expert}.gate_proj"

    @pytest.mark.parametrize(("module", "module_id"), IDS.items())
    def test_every_id(self, module, module_id):
        num_in, num_out = BASE.modules[module]
        num_experts = BASE.num_experts.get(module)
        values = np.arange(1, 1 + (num_experts or 1) * 3 * (num_in + num_out))
        rows = read([values.astype("<f4")], [[module_id, 2, 3]])
        assert {row.module for row in rows} == {module}
        assert [row.expert for row in rows] == ([None] if num_experts is None else [0, 1, 2])
        assert {row.tensors["a"].shape for row in rows} == {(3, num_in)}
        assert {row.tensors["b"].shape for row in rows} == {(num_out, 3)}

    def test_paths_are_the_base_s(self):
        paths = {"experts.gate_proj": "model.layers.{}.block_sparse_moe.experts.{expert}.w1"}
        shapes = msgspec.structs.replace(BASE, paths=paths)
        rows = read([flat(*stacked())], [[GATE, 2, 2]], shapes)
        assert rows[1].origin == "model.layers.2.block_sparse_moe.experts.1.w1"

    @pytest.mark.parametrize("dtype", ["F16", "BF16", "F32"])
    def test_batch_dimension_types_and_padding(self, dtype):
        values = flat(*stacked())
        bits = values.astype({"F16": "<f2"}.get(dtype, "<f4"))
        if dtype == "BF16":
            bits = (bits.view("<u4") >> 16).astype("<u2")
        first = digest(read([bits], [[GATE, 1, 2]], dtype=dtype))
        padded = np.pad(bits, (0, 5))[None, None]
        assert digest(read(padded, [[[GATE, 1, 2, 0]]], dtype=dtype)) == first

    def test_an_expert_whose_b_is_zero_has_no_row(self):
        a, b = stacked()
        b[1] = -0.0
        rows = read([flat(a, b)], [[GATE, 1, 2]])
        assert [row.expert for row in rows] == [0, 2]

    def test_the_rank_of_each_expert_is_its_own(self):
        a, b = stacked(4)
        b[0, :, 2:] = 0
        b[2, :, 1] = 0
        rows = {row.expert: row for row in read([flat(a, b)], [[GATE, 1, 4]])}
        assert [rows[expert].tensors["a"].shape[0] for expert in range(E)] == [2, 4, 3]
        for expert, kept in ((0, [0, 1]), (1, [0, 1, 2, 3]), (2, [0, 2, 3])):
            tensors = rows[expert].tensors
            np.testing.assert_array_equal(tensors["a"].array(), a[expert][kept])
            np.testing.assert_array_equal(tensors["b"].array(), b[expert][:, kept])

    def test_one_expert_is_the_same_layout(self):
        shapes = msgspec.structs.replace(BASE, num_experts=dict.fromkeys(EXPERTS, 1))
        (row,) = read([flat(*stacked(2, num_experts=1))], [[GATE, 1, 2]], shapes)
        assert row.expert == 0


class TestLayersThatDiffer:
    """Ids 5, 6, 7 and 18 are the dense MLP where a layer has one, else the shared expert."""

    @pytest.mark.parametrize(
        ("module_id", "part"), [(5, "gate_proj"), (6, "down_proj"), (7, "up_proj")]
    )
    def test_by_layer(self, module_id, part):
        for layer, module in ((0, part), (1, f"shared_expert.{part}")):
            values = np.ones(sum(BASE.modules[module]))
            (row,) = read([values], [[module_id, layer, 1]])
            assert (row.layer, row.module) == (layer, module)

    def test_up_and_gate_of_the_shared_expert_in_one(self):
        values = flat(np.ones(8), np.full(12, 2.0), np.full(12, 3.0))
        found = {row.module: row.tensors["b"].array() for row in read([values], [[18, 1, 1]])}
        assert set(found["shared_expert.up_proj"].ravel()) == {2.0}
        assert set(found["shared_expert.gate_proj"].ravel()) == {3.0}

    @pytest.mark.parametrize("ids", [(19, 21), (5, 7), (18,)])
    def test_a_base_with_both_in_one_layer(self, ids):
        """Granite's shared expert: the rows are joined, and are what was exported."""
        whole, parts = "shared_expert.gate_up_proj", ("gate_proj", "up_proj")
        sizes = {f"shared_expert.{part}": 12 for part in parts}
        shapes = BaseShapes(3, {whole: (8, 24)}, fused={whole: sizes})
        row = dataclasses.replace(
            lora("shared_expert.gate_proj"), module=whole, tensors=random_tensors(8, 24)
        )
        weights, config = lora_tensors([row], StorageType.FLOAT32)
        table = np.ndarray(config.shape, "<i4", config.data)[0].copy()
        values = np.ndarray(weights.shape, "<f4", weights.data)[0]
        if len(ids) == 1:
            gate, up = values[0, 16:], values[1, 16:]
            table, values = table[:1], flat(values[0, :16], up, gate)[None]
        table[:, 0] = ids
        assert digest(fit_modules(read(values, table, shapes), shapes)) == digest([row])

    def test_two_ids_of_one_layer(self):
        sentence = r"row 0 \(mlp_h_to_4h of layer 1\) and row 1 \(shared_expert_h_to_4h of layer 1"
        with pytest.raises(InvalidAdapterError, match=sentence):
            read(np.ones((2, 20)), [[5, 1, 1], [19, 1, 1]])

    @pytest.mark.parametrize(("module", "module_id"), IDS.items())
    def test_a_dense_layer_has_none(self, module, module_id):
        sentence = (
            rf"not enabled for this model: row 0 .*module id {module_id}, layer 0, rank 1\); this "
            "layer of the base model can be adapted in attn_q, mlp_h_to_4h, mlp_4h_to_h, mlp_gate"
        )
        with pytest.raises(AdapterMismatchError, match=sentence):
            read(np.ones((1, 90)), [[module_id, 0, 1]])


class TestRefusals:
    @pytest.mark.parametrize("padding", [0, 2 * 28])
    def test_a_row_with_one_expert_s_values(self, padding):
        """What hf_lora_convert.py wrote: each expert over the one before, so the last is left."""
        a, b = stacked(num_experts=1)
        values = np.pad(flat(a, b), (0, padding))
        with pytest.raises(InvalidAdapterError) as raised:
            read([values], [[GATE, 1, 2]])
        # TensorRT-LLM's text.
        assert raised.value.message == (
            "lora_weights has to few values for moe_h_to_4h: row 0 of lora_config (module id 13, "
            "layer 1, rank 2) needs 3 experts x 2 x (8 + 6) = 84 and has 28, those of one expert. "
            "Converters that write all experts to one place keep only the last: convert the "
            "adapter again, to A of all experts and then B of all experts"
        )

    def test_too_few_values(self):
        sentence = r"id 13, layer 1, rank 2\) needs 3 experts x 2 x \(8 \+ 6\) = 84, a row has 83"
        with pytest.raises(InvalidAdapterError, match=sentence):
            read([flat(*stacked())[:-1]], [[GATE, 1, 2]])

    def test_more_experts_than_the_base_has(self):
        sentence = r"moe_h_to_4h takes at rank 2 \(3 experts x 2 x \(8 \+ 6\)\): what follows must"
        with pytest.raises(AdapterMismatchError, match=sentence):
            read([flat(*stacked(num_experts=4))], [[GATE, 1, 2]])

    def test_dora_of_experts(self):
        sentence = r"module id 13, layer 1, rank 2\): DoRA of experts is not served"
        with pytest.raises(UnsupportedFeatureError, match=sentence):
            read([flat(*stacked(), np.ones(18))], [[GATE, 1, 2, 1]])

    def test_dora_of_the_shared_expert_is_served(self):
        rows = read(np.ones((1, 8 + 12 + 12)), [[19, 1, 1, 1]])
        assert {row.kind for row in rows} == {RowKind.LORA, RowKind.MAGNITUDE}

    @pytest.mark.parametrize(("place", "matrix"), [(0, "A"), (-1, "B")])
    def test_values_that_are_no_numbers(self, place, matrix):
        values = flat(*stacked())
        values[place] = np.nan
        with pytest.raises(InvalidAdapterError, match=naming(matrix, 0, "NaN", 1)):
            read([values], [[GATE, 1, 2]])

    @pytest.mark.parametrize("fill", [0, 1])
    def test_nothing_but_zeros(self, fill):
        a, b = stacked()
        with pytest.raises(InvalidAdapterError, match=naming("lora_weights")):
            read([flat(a * fill, b * 0)], [[GATE, 1, 2]])


class TestExport:
    @pytest.mark.parametrize(("module", "module_id"), IDS.items())
    def test_every_module(self, module, module_id):
        experts = range(E) if module in EXPERTS else [None]
        rows = [lora(module, layer, expert) for layer in (1, 2) for expert in experts]
        weights, config = lora_tensors(rows, StorageType.FLOAT32)
        table = np.ndarray(config.shape, "<i4", config.data)[0].tolist()
        assert table == [[module_id, 1, 2], [module_id, 2, 2]]
        back = canonical_rows(weights, config, BASE, RankLimits(8))
        assert digest(back) == digest(rows)
        assert [row.origin for row in back] == [row.origin for row in rows]

    def test_ranks_that_differ_are_filled_with_zeros(self):
        rows = [lora("experts.up_proj", 1, expert, rank) for expert, rank in ((0, 1), (2, 4))]
        weights, config = lora_tensors(rows, StorageType.FLOAT32)
        assert np.ndarray(config.shape, "<i4", config.data).tolist() == [[[15, 1, 4]]]
        values = np.ndarray(weights.shape, "<f4", weights.data)[0, 0]
        a, b = values[: E * 4 * 8].reshape(E, 4, 8), values[E * 4 * 8 :].reshape(E, 6, 4)
        np.testing.assert_array_equal(a[0, :1], rows[0].tensors["a"].array())
        np.testing.assert_array_equal(b[0, :, :1], rows[0].tensors["b"].array())
        assert not a[0, 1:].any()
        assert not b[0, :, 1:].any()
        assert not a[1].any()
        assert not b[1].any()
        assert digest(canonical_rows(weights, config, BASE, RankLimits(8))) == digest(rows)

    def test_each_expert_has_its_own_scale(self):
        rows = [lora("experts.up_proj", 1, expert, scale=2.0**expert) for expert in range(E)]
        back = canonical_rows(*lora_tensors(rows, StorageType.FLOAT32), BASE, RankLimits(8))
        for row, own in zip(back, rows, strict=True):
            b = own.tensors["b"].array() * own.scale
            np.testing.assert_array_equal(row.tensors["b"].array(), b)

    def test_the_number_of_experts(self):
        rows = [lora("experts.up_proj", 1, 1)]
        assert count_experts([]) == 0
        assert count_experts(rows) == 2
        assert count_experts([*rows, lora("router", 2)]) == E
        # TensorRT-LLM's text.
        with pytest.raises(InvalidAdapterError, match="has to few values for moe_gate"):
            canonical_rows(*lora_tensors(rows, StorageType.FLOAT32), BASE, RankLimits(8))
        for more, number in (([lora("router", 2)], None), ([], E)):
            pair = lora_tensors([*rows, *more], StorageType.FLOAT32, number)
            assert digest(canonical_rows(*pair, BASE, RankLimits(8))) == digest([*rows, *more])
        with pytest.raises(InvalidAdapterError, match=naming(2, 1)):
            lora_tensors(rows, StorageType.FLOAT32, 1)

    def test_experts_of_different_sizes(self):
        other = dataclasses.replace(
            lora("experts.down_proj", 1, 1), module="experts.up_proj", origin="there"
        )
        with pytest.raises(InvalidAdapterError, match=naming("6 inputs and 8 outputs", "8 and 6")):
            lora_tensors([lora("experts.up_proj", 1, 0), other], StorageType.FLOAT32)

    def test_one_expert_twice(self):
        rows = [lora("experts.up_proj", 1, 0), lora("experts.up_proj", 1, 0)]
        with pytest.raises(UnsupportedFeatureError, match=naming("moe_gate", 1)):
            lora_tensors(rows, StorageType.FLOAT32)

    @pytest.mark.parametrize(
        ("prefix", "ids"), [("shared_expert.", [19, 21]), ("experts.", [13, 15])]
    )
    def test_gate_and_up_in_one_layer_become_two_that_share_a(self, prefix, ids):
        expert = 0 if prefix == "experts." else None
        row = lora(f"{prefix}gate_proj", expert=expert)
        origin = row.origin.replace("gate_proj", "gate_up_proj")
        fused = dataclasses.replace(row, module=f"{prefix}gate_up_proj", origin=origin)
        weights, config = lora_tensors([fused], StorageType.FLOAT32)
        table = np.ndarray(config.shape, "<i4", config.data)[0].tolist()
        assert table == [[module_id, 1, 2] for module_id in ids]
        values = np.ndarray(weights.shape, "<f4", weights.data)[0]
        a, b = row.tensors["a"].array().ravel(), row.tensors["b"].array()
        half = len(b) // 2
        np.testing.assert_array_equal(values[0], flat(a, b[:half]))
        np.testing.assert_array_equal(values[1], flat(a, b[half:]))

    def test_halves_that_are_not_equal(self):
        row = dataclasses.replace(
            lora("shared_expert_gate"), module="shared_expert.gate_up_proj", origin="there"
        )
        with pytest.raises(InvalidAdapterError, match=naming("there", 1)):
            lora_tensors([row], StorageType.FLOAT32)


MIXTRAL_PATHS = {
    "q_proj": "model.layers.{}.self_attn.q_proj",
    "router": "model.layers.{}.block_sparse_moe.gate",
    "experts.gate_proj": "model.layers.{}.block_sparse_moe.experts.{expert}.w1",
    "experts.up_proj": "model.layers.{}.block_sparse_moe.experts.{expert}.w3",
}


class TestEnabledModules:
    @pytest.mark.parametrize(
        ("name", "expected"),
        [
            ("experts.gate_proj", {"experts.gate_proj"}),
            ("gate_proj", {"gate_proj", "experts.gate_proj", "shared_expert.gate_proj"}),
            ("moe_h_to_4h", {"experts.gate_proj"}),
            ("moe_router", {"router"}),
            ("mlp_h_to_4h", {"gate_proj", "shared_expert.gate_proj"}),
            ("shared_expert_h_to_4h", {"shared_expert.gate_proj"}),
            ("mlp_router", {"shared_expert_gate"}),
            # TensorRT-LLM's name of up_proj and Hugging Face's of the sigmoid's layer.
            ("shared_expert_gate", {"shared_expert.up_proj", "shared_expert_gate"}),
        ],
    )
    def test_names(self, name, expected):
        assert set(hf_modules([name], BASE.modules)) == expected

    @pytest.mark.parametrize(
        ("name", "expected"),
        [
            ("w1", ("experts.gate_proj",)),
            ("gate", ("router",)),
            ("block_sparse_moe.gate", ("router",)),
            ("experts.w3", ("experts.up_proj",)),
            ("self_attn.q_proj", ("q_proj",)),
        ],
    )
    def test_names_in_the_base_s_paths(self, name, expected):
        assert hf_modules([name], tuple(MIXTRAL_PATHS), MIXTRAL_PATHS) == expected

    def test_gate_is_the_router_whatever_its_path(self):
        paths = {"router": "model.layers.{}.block_sparse_moe.router.layer"}
        assert hf_modules(["gate", "mlp.gate"], ("router", "q_proj"), paths) == ("router",)

    def test_unknown_names(self):
        with pytest.raises(ConfigError, match=naming("w9", "attn_q", "w1")) as raised:
            hf_modules(["w9"], tuple(MIXTRAL_PATHS), MIXTRAL_PATHS)
        assert "mlp_4h_to_h" not in raised.value.message

    @pytest.mark.parametrize(
        ("name", "module"),
        [
            ("attn_qkv", "qkv_proj"),
            ("mlp_gate_up", "gate_up_proj"),
            ("mlp_h_to_4h", "gate_up_proj"),
            ("attn_q", "qkv_proj"),
            ("shared_expert_h_to_4h", "shared_expert.gate_up_proj"),
        ],
    )
    def test_fused_layers(self, name, module):
        shared = "shared_expert.gate_up_proj"
        modules = ("qkv_proj", "o_proj", "gate_up_proj" if module != shared else shared)
        assert hf_modules([name], modules) == (module,)
