"""GPT-2's modules in every format: two are called c_proj, and q, k and v are one."""

import json

import numpy as np
import pytest

from loraplex.adapters.canonical import CanonicalRow, RowKind, digest
from loraplex.adapters.formats.export import lora_tensors
from loraplex.adapters.formats.export_peft import peft_config, peft_tensors
from loraplex.adapters.formats.modules import hf_modules
from loraplex.adapters.formats.peft import canonical_rows as read_peft
from loraplex.adapters.formats.peft_config import parse_config
from loraplex.adapters.formats.peft_names import parse_name
from loraplex.adapters.formats.storage_type import StorageType
from loraplex.adapters.formats.trtllm import canonical_rows as read_pair
from loraplex.adapters.shapes import BaseShapes
from loraplex.adapters.tensor_file import RawTensor
from loraplex.core.errors import AdapterMismatchError, ConfigError
from loraplex.core.rank_limits import RankLimits
from support.naming import naming

SHAPES = BaseShapes(
    2,
    {
        "attn.c_attn": (8, 24),
        "attn.c_proj": (8, 8),
        "mlp.c_fc": (8, 10),
        "mlp.c_proj": (10, 8),
    },
)
IDS = {"attn.c_attn": 0, "attn.c_proj": 4, "mlp.c_fc": 5, "mlp.c_proj": 6}
RANK = 2


def lora(module: str, layer: int = 0) -> CanonicalRow:
    rng = np.random.default_rng([IDS[module], layer])
    num_in, num_out = SHAPES.modules[module]
    tensors = {
        name: RawTensor("F32", shape, rng.standard_normal(shape).astype("<f4").tobytes())
        for name, shape in (("a", (RANK, num_in)), ("b", (num_out, RANK)))
    }
    path = f"transformer.h.{layer}.{module}"
    return CanonicalRow(layer, module, None, RowKind.LORA, 1.0, tensors, path)


ROWS = [lora(module, layer) for layer in range(2) for module in IDS]


@pytest.mark.parametrize("prefix", ["base_model.model.transformer.", "transformer.", ""])
@pytest.mark.parametrize("module", IDS)
def test_names_of_tensors(prefix: str, module: str) -> None:
    parsed = parse_name(f"{prefix}h.7.{module}.lora_A.weight")
    assert parsed is not None
    assert (parsed.layer, parsed.module) == (7, module)


@pytest.mark.parametrize("path", ["h.0", "h.0.attn.mlp.c_fc", "wpe", "x.h.0"])
def test_names_of_no_module(path: str) -> None:
    assert parse_name(f"base_model.model.transformer.{path}.lora_A.weight") is None


def test_peft_and_back() -> None:
    tensors = peft_tensors(ROWS)
    assert "base_model.model.transformer.h.1.mlp.c_proj.lora_A.weight" in tensors
    config = parse_config(json.dumps(peft_config(ROWS)).encode())
    assert digest(read_peft(config, tensors)) == digest(ROWS)


def test_tensorrt_llm_and_back() -> None:
    weights, config = lora_tensors(ROWS, StorageType.FLOAT32)
    table = np.ndarray(config.shape, "<i4", config.data)[0].tolist()
    assert table == [[module, layer, RANK] for layer in range(2) for module in (0, 4, 5, 6)]
    rows = read_pair(weights, config, SHAPES, RankLimits(8))
    assert digest(rows) == digest(ROWS)
    assert {row.origin for row in rows} == {row.origin for row in ROWS}


def test_modules_that_it_lacks() -> None:
    weights = RawTensor("F32", (1, 32), np.zeros(32, "<f4").tobytes())
    config = RawTensor("I32", (1, 3), np.array([[1, 0, 2]], "<i4").tobytes())
    with pytest.raises(
        AdapterMismatchError, match=naming("attn_q", "attn_qkv", "attn_dense", 0, 1, 2)
    ):
        read_pair(weights, config, SHAPES, RankLimits(8))


def test_modules_that_an_operator_enables() -> None:
    assert hf_modules(["attn_qkv", "mlp_4h_to_h"], SHAPES.modules) == ("attn.c_attn", "mlp.c_proj")
    assert hf_modules(["c_attn", "mlp.c_fc"], SHAPES.modules) == ("attn.c_attn", "mlp.c_fc")
    assert hf_modules(["c_proj"], SHAPES.modules) == ("attn.c_proj", "mlp.c_proj")
    assert hf_modules(["attn_q", "q_proj"], SHAPES.modules) == ()
    with pytest.raises(
        ConfigError, match=naming("c_foo", "attn_qkv", "mlp_4h_to_h", "c_attn", "c_proj")
    ):
        hf_modules(["c_foo"], SHAPES.modules)
