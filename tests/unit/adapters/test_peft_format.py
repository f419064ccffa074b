import json
import math

import numpy as np
import pytest

from loraplex.adapters.formats.peft import canonical_rows
from loraplex.adapters.formats.peft_config import PeftConfig, parse_config
from loraplex.adapters.formats.peft_coverage import target_warnings
from loraplex.adapters.shapes import BaseShapes
from loraplex.adapters.tensor_file import RawTensor
from loraplex.core.errors import (
    InvalidAdapterError,
    UnsupportedFeatureError,
)
from support.naming import naming

CONFIG = PeftConfig(r=2, lora_alpha=4)
Q0 = "base_model.model.model.layers.0.self_attn.q_proj"


def raw(*shape: int, value: float = 1.0) -> RawTensor:
    return RawTensor("F32", shape, np.full(shape, value, "f4").tobytes())


def pair(module: str = Q0, rank=2, num_in=8, num_out=12) -> dict[str, RawTensor]:
    return {
        f"{module}.lora_A.weight": raw(rank, num_in),
        f"{module}.lora_B.weight": raw(num_out, rank),
    }


@pytest.mark.parametrize(
    "form",
    [
        "base_model.model.model.layers.3.self_attn.q_proj.lora_{}.weight",
        "base_model.model.model.layers.3.self_attn.q_proj.lora_{}.default.weight",
        "base_model.model.layers.3.self_attn.q_proj.lora_{}.weight",
        "model.layers.3.self_attn.q_proj.lora_{}.weight",
        "model.layers.3.self_attn.q_proj.lora_{}.my-adapter.weight",
        "layers.3.self_attn.q_proj.lora_{}.weight",
        # Wrappers of torch.compile, DDP, FSDP and activation checkpointing, around any module.
        "_orig_mod.base_model.model.model.layers.3.self_attn.q_proj.lora_{}.weight",
        "base_model.model.model.layers.3._orig_mod.self_attn.q_proj.lora_{}.weight",
        "base_model.model.module.layers.3.self_attn._orig_mod.q_proj.lora_{}.weight",
        "base_model.model.model.layers.3._fsdp_wrapped_module.self_attn.q_proj.lora_{}.weight",
        "base_model.model.model.layers.3._checkpoint_wrapped_module.self_attn.q_proj.lora_{}.weight",
        "module.base_model.model.model.layers.3.self_attn.q_proj._orig_mod.lora_{}.default.weight",
        "base_model.model.model.layers.3._fsdp_wrapped_module._checkpoint_wrapped_module."
        "self_attn.q_proj.lora_{}._fsdp_wrapped_module.weight",
    ],
)
def test_the_forms_of_keys_that_real_files_have(form):
    (row,) = canonical_rows(CONFIG, {form.format("A"): raw(2, 8), form.format("B"): raw(12, 2)})
    assert (row.layer, row.module, row.scale) == (3, "q_proj", 2.0)
    assert row.tensors["a"].shape == (2, 8)
    assert row.tensors["b"].shape == (12, 2)


@pytest.mark.parametrize("root", ["", "model.", "model.language_model.", "language_model.model."])
def test_what_makes_the_own_inputs_of_layers_counts_to_the_first(root):
    path = f"{root}per_layer_model_projection"
    (row,) = canonical_rows(CONFIG, pair(f"base_model.model.{path}"))
    assert (row.layer, row.module, row.origin) == (0, "per_layer_model_projection", path)


def test_wrappers_in_the_config_are_those_of_the_tensors():
    path = "model.layers.0._orig_mod.self_attn.q_proj"
    names = {"target_modules": [path], "rank_pattern": {path: 2}, "alpha_pattern": {path: 6}}
    for config in (names, names | {"target_modules": r".*\.0\._orig_mod\.self_attn\.q_proj"}):
        content = json.dumps({"peft_type": "LORA", "r": 8, **config}).encode()
        (row,) = canonical_rows(parse_config(content), pair(f"base_model.model.{path}"))
        assert (row.module, row.scale) == ("q_proj", 3.0)


def test_any_subset_of_modules_with_their_own_ranks_and_scales():
    config = PeftConfig(
        r=2,
        lora_alpha=3,
        use_rslora=True,
        rank_pattern={"k_proj": 5},
        alpha_pattern={"layers.1.mlp.down_proj": 7},
    )
    layer_1 = "base_model.model.model.layers.1"
    tensors = (
        pair() | pair(f"{layer_1}.self_attn.k_proj", rank=5) | pair(f"{layer_1}.mlp.down_proj")
    )
    rows = canonical_rows(config, tensors)
    expected = [
        (0, "q_proj", 3 / math.sqrt(2)),
        (1, "down_proj", 7 / math.sqrt(2)),
        (1, "k_proj", 3 / math.sqrt(5)),
    ]
    assert [(r.layer, r.module, r.scale) for r in rows] == [
        (layer, module, float(np.float32(scale))) for layer, module, scale in expected
    ]


@pytest.mark.parametrize(
    ("name", "error"),
    [
        (f"{Q0}.lora_magnitude_vector", InvalidAdapterError),
        (f"{Q0}.lora_B.bias", InvalidAdapterError),
        (f"{Q0}.bias", InvalidAdapterError),
        (f"{Q0}.base_layer.weight", InvalidAdapterError),
        (f"{Q0}.vera_lambda_b", UnsupportedFeatureError),
        ("base_model.model.model.decoder.project_in.lora_A.weight", UnsupportedFeatureError),
        (f"{Q0}.lora_embedding_A", UnsupportedFeatureError),
        ("base_model.model.model.embed_tokens.lora_A.weight", UnsupportedFeatureError),
        (f"{Q0}.original_module.weight", InvalidAdapterError),
        ("base_model.model.model.norm.original_module.weight", InvalidAdapterError),
        (
            "base_model.model.lm_head.token_adapter.base_layer.modules_to_save.weight",
            UnsupportedFeatureError,
        ),
        ("base_model.model.model.embed_tokens.trainable_tokens_original", UnsupportedFeatureError),
        ("base_model.model.model.layers.0.mlp.experts.x.w1.lora_A.weight", UnsupportedFeatureError),
        ("base_model.model.model.layers.0.input_layernorm.weight", InvalidAdapterError),
        ("base_model.model.model.layers.0.other.q_proj.lora_A.weight", UnsupportedFeatureError),
        ("vision.layers.0.self_attn.q_proj.lora_A.weight", UnsupportedFeatureError),
        ("mystery", InvalidAdapterError),
        (f"{Q0}.lora_A.weight\n", UnsupportedFeatureError),
    ],
)
def test_a_tensor_that_is_not_applied_is_named(name, error):
    dimensions = 1 if name.endswith(("vector", "bias", "layernorm.weight")) else 2
    with pytest.raises(error) as caught:
        canonical_rows(CONFIG, pair() | {name: raw(*(12,) * dimensions)})
    assert repr(name) in caught.value.message


def test_projections_of_the_embedding_are_refused_with_the_reason():
    tensors = pair() | pair("base_model.model.model.decoder.project_out", num_in=8, num_out=4)
    with pytest.raises(
        UnsupportedFeatureError,
        match=naming(
            "exclude_modules",
            "base_model.model.model.decoder.project_out.lora_A.weight",
            "project_in",
        ),
    ):
        canonical_rows(CONFIG, tensors)


def without(name: str) -> dict[str, RawTensor]:
    return {key: tensor for key, tensor in pair().items() if name not in key}


@pytest.mark.parametrize(
    ("tensors", "named"),
    [
        ({}, ("tensors",)),
        (
            without("lora_B"),
            ("lora_B", "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"),
        ),
        (
            without("lora_A"),
            ("lora_A", "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"),
        ),
        (
            pair() | {f"{Q0}.lora_B.weight": raw(12, 3)},
            (2, 3, "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"),
        ),
        (pair(rank=3), ("rank", 3, "adapter_config.json", 2)),  # language: quoted
        (pair() | pair(Q0.removeprefix("base_model.model.")), ("lora_A",)),
        (
            pair() | {f"{Q0}.lora_A.weight": raw(2, 8, 1)},
            ("[2, 8, 1]", "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"),
        ),
        (
            pair() | {f"{Q0}.lora_A.weight": raw(0, 8)},
            ("[0, 8]", "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"),
        ),
        (
            pair() | {f"{Q0}.lora_A.weight": raw(2, 8, value=math.nan)},
            ("NaN", "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"),
        ),
        (
            pair() | {f"{Q0}.lora_B.weight": raw(12, 2, value=math.inf)},
            ("infinity", "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"),
        ),
    ],
)
def test_broken_pairs_are_named(tensors, named):
    with pytest.raises(InvalidAdapterError, match=naming(*named)):
        canonical_rows(CONFIG, tensors)


def test_a_tensor_of_an_unknown_type_is_refused():
    tensors = pair() | {f"{Q0}.lora_A.weight": RawTensor("F8_E4M3", (2, 8), bytes(16))}
    with pytest.raises(UnsupportedFeatureError, match="F8_E4M3"):
        canonical_rows(CONFIG, tensors)


def test_a_tensor_that_the_config_does_not_target_is_refused():
    config = PeftConfig(r=2, target_modules=["k_proj"])
    with pytest.raises(
        InvalidAdapterError,
        match=naming("base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"),
    ):
        canonical_rows(config, pair())


def test_tensors_come_as_they_are():
    half = pair() | {f"{Q0}.lora_A.weight": RawTensor("BF16", (2, 8), bytes(32))}
    (row,) = canonical_rows(CONFIG, half)
    assert [row.tensors[name].dtype for name in "ab"] == ["BF16", "F32"]


def test_target_modules_without_tensors_are_reported():
    config = PeftConfig(r=2, target_modules=["q_proj", "v_proj", "gate_proj"])
    (warning,) = target_warnings(config, canonical_rows(config, pair()), BaseShapes(1, {}))
    assert "v_proj, gate_proj" in warning
    assert target_warnings(PeftConfig(target_modules=".*"), (), BaseShapes(1, {})) == []
