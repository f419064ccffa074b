"""config.json of families with experts: defaults of absent fields, and what is refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import (
    MixtralConfig,
    OlmoeConfig,
    PretrainedConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)

from loraplex.core.errors import ConfigError, LoraplexError, UnsupportedModelError
from loraplex.models.registry import read_config
from loraplex.models.spec import ModelSpec
from support.families import published_experts
from support.naming import naming

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "vocab_size": 97,
}
NO_TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


def read(folder: Path, config: dict[str, Any]) -> ModelSpec:
    (folder / "config.json").write_text(json.dumps(config))
    return read_config(folder)


def read_changed(folder: Path, name: str, **changes: Any) -> ModelSpec:
    """Read a published config.json with changes."""
    return read(folder, {**published_experts.MODELS[name].config, **changes})


@pytest.mark.parametrize(
    ("architecture", "config_class"),
    [
        ("MixtralForCausalLM", MixtralConfig),
        ("Qwen2MoeForCausalLM", Qwen2MoeConfig),
        ("Qwen3MoeForCausalLM", Qwen3MoeConfig),
        ("OlmoeForCausalLM", OlmoeConfig),
    ],
)
def test_absent_fields_take_the_defaults_of_transformers(
    architecture: str, config_class: type[PretrainedConfig], tmp_path: Path
) -> None:
    full: Any = config_class(**SIZES, **NO_TOKENS).to_dict()
    wanted = read(tmp_path, {**full, "architectures": [architecture]})
    fields: dict[str, Any] = {**SIZES, "architectures": [architecture]}
    assert read(tmp_path, fields) == wanted
    nulls = dict.fromkeys(full.keys() - fields.keys() - {"sliding_window"})
    assert read(tmp_path, {**fields, **nulls}) == wanted


@pytest.mark.parametrize(
    ("fields", "dense"),
    [
        ({}, set()),
        ({"decoder_sparse_step": 2}, {0, 2}),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [1]}, {0, 1, 2}),
        ({"mlp_only_layers": [0, 3]}, {0, 3}),
    ],
)
def test_dense_layers(fields: dict[str, Any], dense: set[int], tmp_path: Path) -> None:
    spec = read_changed(tmp_path, "qwen3-30b-a3b", num_hidden_layers=4, **fields)
    found = {index for index, layer in enumerate(spec.layers) if layer.feed_forward.routing is None}
    assert found == dense
    sizes = [layer.feed_forward.inner_size for layer in spec.layers]
    assert sizes == [6144 if index in dense else 768 for index in range(4)]


@pytest.mark.parametrize("name", ["mixtral-8x7b", "qwen3-30b-a3b", "olmoe-1b-7b"])
def test_both_names_of_the_number_of_experts(name: str, tmp_path: Path) -> None:
    other = {"num_experts": None, "num_local_experts": None}
    specs = [
        read_changed(tmp_path, name, **(other | {field: 16}))
        for field in ("num_experts", "num_local_experts")
    ]
    assert specs[0] == specs[1]
    assert {number for layer in specs[0].num_experts for number in layer.values()} == {16}


@pytest.mark.parametrize(
    ("name", "changes", "error", "named"),
    [
        (
            "mixtral-8x7b",
            {"num_experts_per_tok": 9},
            ConfigError,
            ("num_experts_per_tok", "num_local_experts", 8, 9),
        ),
        (
            "qwen3-30b-a3b",
            {"num_local_experts": 64},
            ConfigError,
            ("num_experts", 128, "num_local_experts", 64),
        ),
        ("qwen1.5-moe-a2.7b", {"num_experts": 0}, ConfigError, ("num_experts", 1, 0)),
        ("olmoe-1b-7b", {"clip_qkv": 8.0}, UnsupportedModelError, ("clip_qkv", 8)),
        (
            "mixtral-8x7b",
            {"architectures": ["MistralForCausalLM"]},
            UnsupportedModelError,
            ("num_local_experts",),
        ),
        (
            "qwen3-30b-a3b",
            {"architectures": ["FalconH1ForCausalLM"]},
            UnsupportedModelError,
            ("FalconH1ForCausalLM", "side by side", "Qwen2_5_VLForConditionalGeneration"),
        ),
    ],
)
def test_what_is_refused(
    name: str,
    changes: dict[str, Any],
    error: type[LoraplexError],
    named: tuple[object, ...],
    tmp_path: Path,
) -> None:
    with pytest.raises(error, match=naming(*named)):
        read_changed(tmp_path, name, **changes)
