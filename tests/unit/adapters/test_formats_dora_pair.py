"""DoRA in the fourth column of TensorRT-LLM's pair: read, written, and what cannot be either."""

import numpy as np
import pytest

from loraplex.adapters.canonical import CanonicalRow, RowKind, digest
from loraplex.adapters.formats.canonical_file import check_rows
from loraplex.adapters.formats.export import lora_tensors
from loraplex.adapters.formats.export_peft import peft_tensors
from loraplex.adapters.formats.storage_type import StorageType
from loraplex.adapters.formats.trtllm import canonical_rows
from loraplex.adapters.shapes import BaseShapes
from loraplex.adapters.tensor_file import RawTensor
from loraplex.core.errors import UnsupportedFeatureError
from loraplex.core.rank_limits import RankLimits
from support.naming import naming

LIMITS = RankLimits(8)

MODULES = {
    "q_proj": (8, 12),
    "k_proj": (8, 4),
    "v_proj": (8, 4),
    "gate_proj": (8, 10),
    "up_proj": (8, 6),
}
BASE = BaseShapes(2, MODULES, vocab_size=50, hidden_size=8)


def raw(array: np.ndarray) -> RawTensor:
    return RawTensor({"f": "F32", "i": "I32"}[array.dtype.kind], array.shape, array.tobytes())


def read(weights: np.ndarray, config: list[list[int]]) -> dict[tuple, CanonicalRow]:
    rows = check_rows(canonical_rows(raw(weights), raw(np.array(config, "<i4")), BASE, LIMITS))
    return {(row.layer, row.module, row.kind): row for row in rows}


def row_of(*parts: int, width: int = 200) -> np.ndarray:
    """Parts of so many values, numbered through: 1, 2, 3 ..."""
    row = np.zeros(width, "<f4")
    row[: sum(parts)] = 1 + np.arange(sum(parts))
    return row


def test_the_factor_follows_b():
    rows = read(row_of(16, 24, 12)[None], [[1, 0, 2, 1]])
    factor = rows[0, "q_proj", RowKind.MAGNITUDE]
    assert list(factor.tensors) == ["factor"]
    assert factor.tensors["factor"].array().tolist() == list(range(41, 53))
    assert rows[0, "q_proj", RowKind.LORA].tensors["b"].array()[-1, -1] == 40
    assert len(rows) == 2


def test_each_part_of_a_fused_module_has_its_own_share():
    weights = np.stack([row_of(8, 20, 20), row_of(8, 16, 16)])
    rows = read(weights, [[0, 1, 1, 1], [18, 0, 1, 1]])
    shares = {
        (layer, module): row.tensors["factor"].array().tolist()
        for (layer, module, kind), row in rows.items()
        if kind is RowKind.MAGNITUDE
    }
    assert shares == {
        (1, "q_proj"): list(range(29, 41)),
        (1, "k_proj"): list(range(41, 45)),
        (1, "v_proj"): list(range(45, 49)),
        (0, "up_proj"): list(range(25, 31)),
        (0, "gate_proj"): list(range(31, 41)),
    }


def test_rows_with_and_without_it_go_together_and_come_back():
    weights = np.stack([row_of(16, 24, 12), row_of(8, 4)])
    rows = tuple(read(weights, [[1, 0, 2, 1], [2, 0, 1, 0]]).values())
    written, config = lora_tensors(rows, StorageType.FLOAT32)
    table = np.ndarray(config.shape, "<i4", config.data)[0].tolist()
    assert table == [[1, 0, 2, 1], [2, 0, 1, 0]]
    np.testing.assert_array_equal(written.array()[0], weights[:, :52])
    again = canonical_rows(written, config, BASE, LIMITS)
    assert digest(again) == digest(rows)


def test_without_any_the_config_keeps_three_columns():
    rows = tuple(read(row_of(8, 4)[None], [[2, 0, 1, 0]]).values())
    assert lora_tensors(rows, StorageType.FLOAT32)[1].shape == (1, 1, 3)


def test_magnitudes_as_they_were_trained_need_the_base_first():
    lora, factor = read(row_of(16, 24, 12)[None], [[1, 0, 2, 1]]).values()
    trained = CanonicalRow(
        0, "q_proj", None, RowKind.MAGNITUDE, 1.0, {"magnitude": factor.tensors["factor"]}, "here"
    )
    with pytest.raises(UnsupportedFeatureError, match=naming("here")):
        lora_tensors((lora, trained), StorageType.FLOAT32)
    with pytest.raises(
        UnsupportedFeatureError, match=naming("model.layers.0.self_attn.q_proj", "DoRA", "PEFT")
    ):
        peft_tensors((lora, factor))
