"""What adapters may not change is refused in the words that clients look for."""

import msgspec
import numpy as np
import pytest

from loraplex.adapters.base_check import check_shapes, check_targets
from loraplex.adapters.canonical import CanonicalRow, RowKind
from loraplex.adapters.formats import trtllm
from loraplex.adapters.formats.modules import hf_modules
from loraplex.adapters.shapes import BaseShapes
from loraplex.adapters.tensor_file import RawTensor
from loraplex.core.adapter import EMBEDDING, LoraTarget
from loraplex.core.errors import AdapterMismatchError, ConfigError
from loraplex.core.rank_limits import RankLimits
from support.naming import naming

SHAPES = BaseShapes(2, {"q_proj": (8, 8), "o_proj": (8, 8)}, vocab_size=50, hidden_size=8)
ONLY_Q = msgspec.structs.replace(SHAPES, enabled_modules=("q_proj",))
NO_LORA = msgspec.structs.replace(SHAPES, enabled_modules=())
# TensorRT-LLM's text.
REFUSED = "lora module .*o_proj.* not enabled for this model"


def row(module: str) -> CanonicalRow:
    half = np.ones((1, 8), "<f2")
    a = RawTensor("F16", (1, 8), half.tobytes())
    b = RawTensor("F16", (8, 1), half.tobytes())
    return CanonicalRow(0, module, None, RowKind.LORA, 1.0, {"a": a, "b": b}, f"layers.0.{module}")


def target(module: str) -> LoraTarget:
    return LoraTarget(0, module, 1, 8, 8)


def test_rows() -> None:
    check_shapes([row("q_proj"), row("o_proj")], SHAPES, RankLimits(8))
    check_shapes([row("q_proj")], ONLY_Q, RankLimits(8))
    with pytest.raises(
        AdapterMismatchError, match=naming("layers.0.o_proj.lora_A", "o_proj", "q_proj")
    ):
        check_shapes([row("q_proj"), row("o_proj")], ONLY_Q, RankLimits(8))
    with pytest.raises(AdapterMismatchError, match="without LoRA"):
        check_shapes([row("q_proj")], NO_LORA, RankLimits(8))


def test_what_was_staged_before() -> None:
    check_targets([target("q_proj")], ONLY_Q, RankLimits(8))
    with pytest.raises(AdapterMismatchError, match=REFUSED):
        check_targets([target("o_proj")], ONLY_Q, RankLimits(8))


@pytest.mark.parametrize(("module_id", "name"), [(4, "attn_dense"), (0, "attn_qkv")])
def test_tensors_of_a_request(module_id: int, name: str) -> None:
    weights = RawTensor("F16", (1, 64), np.ones((1, 64), "<f2").tobytes())
    config = RawTensor("I32", (1, 3), np.array([[module_id, 0, 1]], "<i4").tobytes())
    with pytest.raises(AdapterMismatchError, match=naming(name, 0, 1)):
        trtllm.canonical_rows(weights, config, ONLY_Q, RankLimits(8))


def test_tensors_of_a_request_where_adapters_are_off() -> None:
    weights = RawTensor("F16", (1, 16), np.ones((1, 16), "<f2").tobytes())
    config = RawTensor("I32", (1, 3), np.array([[1, 0, 1]], "<i4").tobytes())
    with pytest.raises(AdapterMismatchError, match=naming("lora_plugin", 0, 1)):
        trtllm.canonical_rows(weights, config, NO_LORA, RankLimits(8))


def test_ends_of_the_model_go_with_any_module() -> None:
    assert ONLY_Q.enables(EMBEDDING)
    assert not NO_LORA.enables(EMBEDDING)
    assert SHAPES.is_adaptable
    assert not NO_LORA.is_adaptable


def test_names_of_both_kinds() -> None:
    llama = ("q_proj", "k_proj", "v_proj", "o_proj")
    assert hf_modules(["attn_q", "v_proj", "attn_dense"], llama) == ("q_proj", "v_proj", "o_proj")
    assert hf_modules(["attn_qkv", "q_proj"], llama) == ("q_proj", "k_proj", "v_proj")
    with pytest.raises(ConfigError, match=naming("query", "attn_qkv")):
        hf_modules(["query"], llama)
