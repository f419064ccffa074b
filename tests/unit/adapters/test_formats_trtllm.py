"""TensorRT-LLM's tensors: the documented example, every module id, every error by its sentence."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.adapters.canonical import CanonicalRow, digest
from loraplex.adapters.formats.modules import LORA_MODULES
from loraplex.adapters.formats.trtllm import canonical_rows
from loraplex.adapters.shapes import BaseShapes
from loraplex.adapters.tensor_file import RawTensor
from loraplex.core.errors import (
    AdapterMismatchError,
    AdapterTooLargeError,
    InvalidAdapterError,
)
from loraplex.core.rank_limits import RankLimits
from support.examples import examples
from support.naming import naming

LIMITS = RankLimits(8)

BASE = BaseShapes(
    num_layers=3,
    modules={
        "q_proj": (8, 12),
        "k_proj": (8, 4),
        "v_proj": (8, 4),
        "o_proj": (12, 8),
        "gate_proj": (8, 10),
        "up_proj": (8, 10),
        "down_proj": (10, 8),
    },
)

# id: (name, the Hugging Face layers in it). Written out again: the prose of the documentation has
# 5 and 7 the other way round.
HELD = {
    0: ("attn_qkv", ["q_proj", "k_proj", "v_proj"]),
    1: ("attn_q", ["q_proj"]),
    2: ("attn_k", ["k_proj"]),
    3: ("attn_v", ["v_proj"]),
    4: ("attn_dense", ["o_proj"]),
    5: ("mlp_h_to_4h", ["gate_proj"]),
    6: ("mlp_4h_to_h", ["down_proj"]),
    7: ("mlp_gate", ["up_proj"]),
    18: ("mlp_gate_up", ["up_proj", "gate_proj"]),
}
OF_EXPERTS = {
    13: ("moe_h_to_4h", ["experts.gate_proj"]),
    14: ("moe_4h_to_h", ["experts.down_proj"]),
    15: ("moe_gate", ["experts.up_proj"]),
    16: ("moe_router", ["router"]),
    17: ("mlp_router", ["shared_expert_gate"]),
    19: ("shared_expert_h_to_4h", ["shared_expert.gate_proj"]),
    20: ("shared_expert_4h_to_h", ["shared_expert.down_proj"]),
    21: ("shared_expert_gate", ["shared_expert.up_proj"]),
}
OF_MIXERS = {
    22: ("mamba_in_proj", ["in_proj"]),
    23: ("mamba_out_proj", ["out_proj"]),
    24: ("moe_latent_fc1", ["fc1_latent_proj"]),
    25: ("moe_latent_fc2", ["fc2_latent_proj"]),
}
"""Modules that this base lacks: test_formats_trtllm_experts and test_recurrent_names have them."""
OF_CROSS = {
    8: ("cross_attn_qkv", ["cross_attn.q_proj", "cross_attn.k_proj", "cross_attn.v_proj"]),
    9: ("cross_attn_q", ["cross_attn.q_proj"]),
    10: ("cross_attn_k", ["cross_attn.k_proj"]),
    11: ("cross_attn_v", ["cross_attn.v_proj"]),
    12: ("cross_attn_dense", ["cross_attn.o_proj"]),
}
"""Modules that this base lacks: golden/test_encoder_decoders has them."""
ABSENT = {module_id: name for module_id, (name, _) in (OF_CROSS | OF_EXPERTS | OF_MIXERS).items()}
TYPES = {"<f2": "F16", "<f4": "F32", "<u2": "BF16", "<i4": "I32", "<i8": "I64", "<f8": "F64"}


def raw(array: np.ndarray) -> RawTensor:
    """An unsigned 16-bit array stands for bfloat16."""
    return RawTensor(TYPES[array.dtype.str], array.shape, array.tobytes())


def read(weights, config, shapes=BASE, max_rank=8) -> tuple[CanonicalRow, ...]:
    return canonical_rows(
        raw(np.asarray(weights)), raw(np.asarray(config, "<i4")), shapes, RankLimits(max_rank)
    )


def row_of(rows, layer, module) -> CanonicalRow:
    (found,) = (row for row in rows if (row.layer, row.module) == (layer, module))
    return found


def delta(row: CanonicalRow) -> np.ndarray:
    return row.tensors["b"].array().astype("f8") @ row.tensors["a"].array().astype("f8") * row.scale


class TestTheDocumentedExample:
    """docs/source/advanced/lora.md of TensorRT-LLM: 4 layers, hidden size 4, q and k."""

    CONFIG = ((1, 0, 2), (2, 0, 4), (1, 1, 2), (2, 1, 4), (1, 2, 2), (1, 3, 8))
    SHAPES = BaseShapes(4, {"q_proj": (4, 4), "k_proj": (4, 4)})

    def weights(self) -> np.ndarray:
        """Every value encodes its position: 1000 x row + its index in the row; 0 is padding."""
        weights = np.zeros((6, 64), "<f4")
        for index, (_, _, rank) in enumerate(self.CONFIG):
            count = rank * 4 + 4 * rank
            weights[index, :count] = 1000 * (index + 1) + np.arange(count)
        return weights

    def test_value_by_value(self):
        rows = read(self.weights(), self.CONFIG, self.SHAPES)
        assert [(row.layer, row.module, row.scale) for row in rows] == [
            (0, "k_proj", 1.0),
            (0, "q_proj", 1.0),
            (1, "k_proj", 1.0),
            (1, "q_proj", 1.0),
            (2, "q_proj", 1.0),
            (3, "q_proj", 1.0),
        ]
        for index, (module_id, layer, rank) in enumerate(self.CONFIG):
            row = row_of(rows, layer, {1: "q_proj", 2: "k_proj"}[module_id])
            base = 1000 * (index + 1)
            for i in range(rank):
                for j in range(4):
                    assert row.tensors["a"].array()[i, j] == base + 4 * i + j
                    assert row.tensors["b"].array()[j, i] == base + 4 * rank + rank * j + i
            assert row.tensors["a"].shape == (rank, 4)
            assert row.tensors["b"].shape == (4, rank)

    def test_the_first_row_written_out(self):
        row = row_of(read(self.weights(), self.CONFIG, self.SHAPES), 0, "q_proj")
        assert row.tensors["a"].array().tolist() == [
            [1000, 1001, 1002, 1003],
            [1004, 1005, 1006, 1007],
        ]
        assert row.tensors["b"].array().tolist() == [
            [1008, 1009],
            [1010, 1011],
            [1012, 1013],
            [1014, 1015],
        ]

    def test_the_order_of_rows_the_batch_dimension_and_the_dora_column_change_nothing(self):
        weights, config = self.weights(), np.array(self.CONFIG, "<i4")
        first = digest(read(weights, config, self.SHAPES))
        order = [3, 0, 5, 1, 4, 2]
        assert digest(read(weights[order], config[order], self.SHAPES)) == first
        assert digest(read(weights[None], config[None], self.SHAPES)) == first
        with_column = np.concatenate([config, np.zeros((6, 1), "<i4")], axis=1)
        assert digest(read(weights, with_column, self.SHAPES)) == first
        padded = np.concatenate([weights, np.full((6, 3), -0.0, "<f4")], axis=1)
        assert digest(read(padded, config, self.SHAPES)) == first


def random_row(rng, module_id, rank, kind, width) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(row, A, B) with the values as float64."""
    parts = HELD[module_id][1]
    in_features = BASE.modules[parts[0]][0]
    out_features = sum(BASE.modules[part][1] for part in parts)
    values = rng.normal(size=rank * (in_features + out_features))
    if kind == "<u2":
        stored = (values.astype("<f4").view("<u4") >> 16).astype("<u2")
        read_back = (stored.astype("<u4") << 16).view("<f4")
    else:
        stored = read_back = values.astype(kind)
    row = np.zeros(width, kind)
    row[: len(stored)] = stored
    a, b = read_back[: rank * in_features], read_back[rank * in_features :]
    return row, a.reshape(rank, -1).astype("f8"), b.reshape(-1, rank).astype("f8")


@st.composite
def adapters(draw):
    """Rows of any enabled module, none that holds a layer twice; any rank, type and padding."""
    places = draw(
        st.lists(
            st.tuples(st.integers(0, 2), st.sampled_from(sorted(HELD))),
            min_size=1,
            unique=True,
        )
    )
    taken, chosen = set(), []
    for layer, module_id in places:
        held = {(layer, part) for part in HELD[module_id][1]}
        if not held & taken:
            taken |= held
            chosen.append((layer, module_id, draw(st.integers(1, 5))))
    return chosen, draw(st.sampled_from(["<f2", "<f4", "<u2"])), draw(st.integers(0, 9))


@examples(0.6)
@given(adapters(), st.booleans(), st.booleans(), st.integers(0, 2**32 - 1))
def test_random_adapters_over_all_enabled_modules(adapter, with_batch, with_column, seed):
    chosen, kind, padding = adapter
    rng = np.random.default_rng(seed)
    width = padding + max(
        rank * (BASE.modules[HELD[m][1][0]][0] + sum(BASE.modules[p][1] for p in HELD[m][1]))
        for _, m, rank in chosen
    )
    made = [random_row(rng, module_id, rank, kind, width) for _, module_id, rank in chosen]
    weights = np.stack([row for row, _, _ in made])
    columns = [[m, layer, rank, 0][: 4 if with_column else 3] for layer, m, rank in chosen]
    config = np.array(columns, "<i4")
    rows = read(weights[None] if with_batch else weights, config[None] if with_batch else config)
    assert len(rows) == sum(len(HELD[module_id][1]) for _, module_id, _ in chosen)
    for (layer, module_id, rank), (_, a, b) in zip(chosen, made, strict=True):
        start = 0
        for part in HELD[module_id][1]:
            row = row_of(rows, layer, part)
            end = start + BASE.modules[part][1]
            assert row.tensors["a"].shape == (rank, BASE.modules[part][0])
            np.testing.assert_array_equal(delta(row), b[start:end] @ a)
            assert row.tensors["a"].dtype == TYPES[kind]
            start = end


def test_the_module_table():
    assert {m.id: m.name for m in LORA_MODULES} == {i: n for i, (n, _) in HELD.items()} | ABSENT
    assert {m.id: list(m.parts) for m in LORA_MODULES if m.parts} == {
        module_id: parts
        for module_id, (_, parts) in (HELD | OF_CROSS | OF_EXPERTS | OF_MIXERS).items()
    }


class TestFusedModules:
    def test_qkv_shares_a_and_splits_b_by_the_base(self):
        a, b = np.arange(8.0), np.arange(100.0, 120.0)
        rows = read([np.concatenate([a, b]).astype("<f4")], [[0, 1, 1]])
        found = {row.module: row.tensors for row in rows}
        assert all(tensors["a"].array().tolist() == [a.tolist()] for tensors in found.values())
        assert found["q_proj"]["b"].array().ravel().tolist() == list(range(100, 112))
        assert found["k_proj"]["b"].array().ravel().tolist() == list(range(112, 116))
        assert found["v_proj"]["b"].array().ravel().tolist() == list(range(116, 120))
        assert [row.origin for row in rows][:1] == ["model.layers.1.self_attn.k_proj"]

    def test_the_first_half_of_gate_up_is_up(self):
        row = np.concatenate([np.ones(8), np.full(10, 2.0), np.full(10, 3.0)]).astype("<f4")
        found = {r.module: r.tensors["b"].array() for r in read([row], [[18, 0, 1]])}
        assert set(found["up_proj"].ravel()) == {2.0}
        assert set(found["gate_proj"].ravel()) == {3.0}

    @pytest.mark.parametrize("other", [1, 2, 3])
    def test_a_layer_that_is_held_twice_is_refused(self, other):
        weights = np.ones((2, 28), "<f4")
        weights[0, :], weights[1, :] = 0, 0
        with pytest.raises(InvalidAdapterError, match=naming(0, "attn_qkv", 1)):
            read(weights, [[0, 1, 1], [other, 1, 1]])


def q_row(rank=1, width=None) -> np.ndarray:
    row = np.zeros(width or rank * 20, "<f4")
    row[: rank * 20] = 1
    return row


class TestErrors:
    """The sentences that clients of TensorRT-LLM look for, and what was wrong."""

    # TensorRT-LLM's text.
    @pytest.mark.parametrize(
        ("weights", "config", "error", "sentence"),
        [
            (np.zeros(20, "<f4"), [[1, 0, 1]], InvalidAdapterError,
             r"Invalid shape for lora_weights tensor: \[20\]"),
            (np.zeros((1, 1, 1, 20), "<f4"), [[1, 0, 1]], InvalidAdapterError,
             r"Invalid shape for lora_weights tensor: \[1, 1, 1, 20\]"),
            (np.zeros((0, 20), "<f4"), np.zeros((0, 3)), InvalidAdapterError,
             "Invalid shape for lora_weights tensor.*at least one row"),
            ([q_row()], [1, 0, 1], InvalidAdapterError,
             r"Invalid shape for lora_keys tensor: \[3\]"),
            (np.zeros((2, 1, 20), "<f4"), [[1, 0, 1]], InvalidAdapterError,
             r"Expected batch dimension to be 1 for each lora request: lora_weights .*\[2, 1, 20"),
            ([q_row()], np.zeros((2, 1, 3)), InvalidAdapterError,
             "Expected batch dimension to be 1 for each lora request: lora_keys"),
            (np.zeros((1, 20), "<i4"), [[1, 0, 1]], InvalidAdapterError,
             "Expected lora weights to be the same data type as base model.*I32"),
            ([q_row(), q_row()], [[1, 0, 1]], InvalidAdapterError,
             "Expected dim1 lora_weights and lora_keys to have the same size.*2 and 1"),
            ([q_row()], [[1, 0]], InvalidAdapterError,
             r"Expected dim2 of lora_keys to have a size in \[3, 4\].* is 2"),
            ([q_row()], [[1, 0, 1, 0, 0]], InvalidAdapterError,
             r"Expected dim2 of lora_keys to have a size in \[3, 4\].* is 5"),
            ([q_row()], [[1, 3, 1]], AdapterMismatchError,
             r"Expected layerId to be in the range \[0, numModelLayers\).*layer 3.*has 3 layers"),
            ([q_row()], [[1, -1, 1]], AdapterMismatchError,
             r"Expected layerId to be in the range \[0, numModelLayers\).*layer -1"),
            ([q_row()], [[1, 0, 0]], InvalidAdapterError,
             "Expected adapterSize to be > 0: row 0.*rank 0"),
            ([q_row()], [[1, 0, -4]], InvalidAdapterError, "Expected adapterSize to be > 0"),
            ([q_row(2, 39)], [[1, 0, 2]], InvalidAdapterError,
             r"lora_weights has to few values for attn_q: .*2 x \(8 \+ 12\) = 40, a row has 39"),
            ([q_row(9)], [[1, 0, 9]], AdapterTooLargeError,
             r"Invalid low_rank \(9\). low_rank must be smaller than mMaxLowRank \(8\)"),
            ([q_row()], [[1, 0, 1, 1]], InvalidAdapterError,
             r"1 x \(8 \+ 12\) \+ DoRA = 32, a row has 20"),
            ([np.append(q_row(), np.full(12, np.nan, "<f4"))], [[1, 0, 1, 1]], InvalidAdapterError,
             "DoRA's factor in row 0"),
            ([np.append(q_row(), np.ones(12, "<f4"))], [[1, 0, 1, 0]], AdapterMismatchError,
             "more than the 20 values"),
            ([q_row()], [[1, 0, 1, 7]], InvalidAdapterError, "fourth column is 7"),
            ([q_row()], [[26, 0, 1]], InvalidAdapterError, "module ids are 0 to 25"),
            ([q_row()], [[-1, 0, 1]], InvalidAdapterError, "module ids are 0 to 25"),
            ([q_row()], [[2, 0, 1]], AdapterMismatchError,
             r"row 0 \(attn_k of layer 0\).*more than the 12 values"),
            ([q_row(), q_row()], [[1, 0, 1], [1, 0, 1]], InvalidAdapterError,
             "row 0.*and row 1.*both hold q_proj"),
        ],
    )  # fmt: skip
    def test_by_sentence(self, weights, config, error, sentence):
        with pytest.raises(error, match=sentence) as raised:
            read(np.asarray(weights), np.asarray(config, "<i4"))
        assert type(raised.value) is error

    @pytest.mark.parametrize(("module_id", "name"), ABSENT.items())
    def test_modules_that_no_base_has(self, module_id, name):
        sentence = f"lora module {name} not enabled for this model"
        with pytest.raises(AdapterMismatchError, match=sentence):
            read([q_row()], [[module_id, 0, 1]])

    @pytest.mark.parametrize(
        ("module_id", "missing"), [(5, "gate_proj"), (0, "v_proj"), (18, "up_proj")]
    )
    def test_modules_that_this_base_lacks(self, module_id, missing):
        modules = {name: shape for name, shape in BASE.modules.items() if name != missing}
        name = HELD[module_id][0]
        with pytest.raises(AdapterMismatchError, match=naming(name, 0, 1)) as raised:
            read([q_row(3)], [[module_id, 0, 1]], BaseShapes(3, modules))
        assert name not in raised.value.message.split("can be adapted in")[1].split(", ")

    def test_config_of_another_type(self):
        sentence = "Expected  lora keys to have TYPE_INT32 but was I64"
        with pytest.raises(InvalidAdapterError, match=sentence):
            canonical_rows(raw(q_row()[None]), raw(np.array([[1, 0, 1]], "<i8")), BASE, LIMITS)

    def test_the_largest_rank_is_allowed(self):
        assert read([q_row(8)], [[1, 0, 8]])[0].tensors["a"].shape == (8, 8)

    @pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
    @pytest.mark.parametrize(("place", "matrix"), [(0, "A"), (19, "B")])
    def test_values_that_are_no_numbers(self, bad, place, matrix):
        row = q_row()
        row[place] = bad
        with pytest.raises(InvalidAdapterError, match=naming(matrix, 0, "NaN")):
            read([row], [[1, 0, 1]])

    @pytest.mark.parametrize("kind", ["<f2", "<f4", "<u2"])
    def test_one_value_in_the_padding(self, kind):
        row = np.zeros((1, 25), kind)
        row[0, 24] = 1
        with pytest.raises(AdapterMismatchError, match=naming(0, 1, "attn_q")):
            read(row, [[1, 0, 1]])

    @pytest.mark.parametrize("num_bytes", [0, 79, 81])
    def test_bytes_that_do_not_fit_the_shape(self, num_bytes):
        weights = RawTensor("F32", (1, 20), bytes(num_bytes))
        with pytest.raises(InvalidAdapterError, match=naming(80, num_bytes)):
            canonical_rows(weights, raw(np.array([[1, 0, 1]], "<i4")), BASE, LIMITS)
