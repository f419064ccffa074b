"""Fields of the families that are refused by name, that are null, or that a wrapper overrides."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from loraplex.core.errors import ConfigError, UnsupportedModelError
from loraplex.models.registry import read_config
from loraplex.models.spec import ModelSpec
from support.families.published import MODELS
from support.naming import naming


def read(folder: Path, name: str, text: dict[str, Any] | None = None, **changes: Any) -> ModelSpec:
    """Read a published config.json with changes; text: those of its text_config."""
    config = copy.deepcopy(dict(MODELS[name].config)) | changes
    if text is not None:
        config["text_config"] |= text
    (folder / "config.json").write_text(json.dumps(config))
    return read_config(folder)


@pytest.mark.parametrize(
    ("name", "changes", "named"),
    [
        ("gemma-2b", {"use_bidirectional_attention": True}, ("use_bidirectional_attention",)),
        ("olmo-2-7b", {"is_causal": False}, ("is_causal false", "later", "Qwen2Model")),
        ("gemma-3-4b-it", {"text": {"is_causal": False}}, ("text_config", "is_causal false")),
        (
            "gemma-3-4b-it",
            {"text": {"use_bidirectional_attention": True}},
            ("text_config", "use_bidirectional_attention"),
        ),
        ("gemma-2-27b", {"use_bidirectional_attention": True}, ("use_bidirectional_attention",)),
        ("gemma-3-1b-it", {"attn_logit_softcapping": 50.0}, ("attn_logit_softcapping", 3)),
        (
            "gemma-3-1b-it",
            {"rope_parameters": {"rope_type": "linear"}},
            ("rope_type", "rope_parameters", "full_attention"),
        ),
        (
            "gemma-3-4b-it",
            {"quantization_config": {"bits": 4}},
            ("quantization_config", "quant_method", "fbgemm_fp8"),
        ),
        ("gemma-3-4b-it", {"text": {"num_experts": 8}}, ("text_config", "num_experts")),
        ("gemma-4-12b-it", {"text": {"enable_moe_block": True}}, ("enable_moe_block true",)),
        (
            "gemma-4-e2b-it",
            {"text": {"use_bidirectional_attention": "all"}},
            ("text_config", "use_bidirectional_attention", "all", "vision"),
        ),
        (
            "gemma-4-e2b-it",
            {"text": {"vocab_size_per_layer_input": 128}},
            ("vocab_size_per_layer_input", 128, 262_144),
        ),
        (
            "gemma-4-e2b-it",
            {"text": {"per_layer_config": {"4": {"num_attention_heads": 2}}}},
            ("per_layer_config", "4", "num_attention_heads"),
        ),
        (
            "gemma-4-e2b-it",
            {"text": {"per_layer_config": {"34": {"head_dim": 128}}}},
            ("text_config", "share keys and values", "other sizes"),
        ),
        (
            "gemma-4-31b-it",
            {"text": {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}},
            ("text_config", "rope_parameters", "two sizes"),
        ),
        (
            "mistral-small-3.1-24b",
            {"text": {"model_type": "llama"}},
            ("model_type", "llama", "text_config"),
        ),
        ("phi-4-mini", {"lm_head_bias": True}, ("lm_head_bias",)),
        (
            "phi-4-mini",
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
            ("linear", 3, "rope_scaling"),
        ),
        (
            "gemma-3-4b-it",
            {"architectures": ["MllamaForConditionalGeneration"]},
            ("MllamaForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration"),
        ),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    tmp_path: Path, name: str, changes: dict[str, Any], named: tuple[object, ...]
) -> None:
    with pytest.raises(UnsupportedModelError, match=naming(*named)):
        read(tmp_path, name, **changes)


@pytest.mark.parametrize(
    ("name", "changes", "named"),
    [
        ("gemma-3-4b-it", {"text_config": None}, ("config.json", "text_config")),
        (
            "ministral-3-8b",
            {"text": {"rope_parameters": {"rope_type": "yarn"}}},
            ("llama_4_scaling_beta", "rope_parameters", "text_config"),
        ),
        ("granite-3.1-8b", {"logits_scaling": 0}, ("logits_scaling", 0)),
        ("gemma-2-27b", {"final_logit_softcapping": -1}, ("final_logit_softcapping", -1)),
        ("gemma-2-27b", {"sliding_window": 0}, ("sliding_window", 0)),
        ("gemma-4-31b-it", {"text": {"enable_moe_block": True}}, ("text_config", "num_experts")),
        (
            "gemma-4-26b-a4b-it",
            {"text": {"top_k_experts": 129}},
            ("text_config", "top_k_experts", 128, 129),
        ),
        (
            "gemma-4-e2b-it",
            {"text": {"num_kv_shared_layers": 35}},
            ("num_kv_shared_layers", "num_hidden_layers", 35),
        ),
        ("gemma-4-e2b-it", {"text": {"num_kv_shared_layers": 31}}, ("num_kv_shared_layers", 31)),
        (
            "gemma-4-31b-it",
            {"text": {"num_global_key_value_heads": 5}},
            ("num_attention_heads", 32, "num_key_value_heads", 5),
        ),
    ],
)
def test_errors_name_the_field(
    tmp_path: Path, name: str, changes: dict[str, Any], named: tuple[object, ...]
) -> None:
    with pytest.raises(ConfigError, match=naming(*named)):
        read(tmp_path, name, **changes)


def test_a_cap_that_is_null_is_none(tmp_path: Path) -> None:
    caps = {"attn_logit_softcapping": None, "final_logit_softcapping": None}
    spec = read(tmp_path, "gemma-2-27b", sliding_window=None, **caps)
    attention = spec.layers[0].mixer
    assert (spec.logits_soft_cap, attention.soft_cap, attention.window) == (None, None, None)


def test_layers_of_a_gemma_4_read_the_last_keys_of_their_type(tmp_path: Path) -> None:
    mixers = [layer.mixer for layer in read(tmp_path, "gemma-4-e2b-it").layers]
    assert [mixer.kv_distance for mixer in mixers[:15]] == [0] * 15
    sources = [index - mixer.kv_distance for index, mixer in enumerate(mixers)][15:]
    assert sources == [13, 13, 13, 13, 14] * 4
    assert [mixer.head_dim for mixer in mixers] == [256, 256, 256, 256, 512] * 7


def test_the_heads_of_a_gemma_4_that_transformers_saved(tmp_path: Path) -> None:
    own = {str(index): {"head_dim": 512, "num_key_value_heads": 4} for index in range(5, 60, 6)}
    published = read(tmp_path, "gemma-4-31b-it")
    text = {"per_layer_config": own, "num_global_key_value_heads": None, "global_head_dim": None}
    assert read(tmp_path, "gemma-4-31b-it", text).layers == published.layers


def test_the_length_of_a_gemma_3_is_stated_as_it_is_after_stretching(tmp_path: Path) -> None:
    assert read(tmp_path, "gemma-3-4b-it").default_max_model_len == 131_072


@pytest.mark.parametrize("is_tied", [False, True])
def test_the_wrapper_decides_whether_the_head_is_tied(tmp_path: Path, is_tied: bool) -> None:
    text = {"tie_word_embeddings": not is_tied}
    spec = read(tmp_path, "gemma-3-4b-it", text, tie_word_embeddings=is_tied)
    assert spec.tie_word_embeddings is is_tied


def test_an_older_qwen_vl_ties_its_head_in_the_text_config(tmp_path: Path) -> None:
    text = {**MODELS["qwen2.5-vl-3b"].config, "tie_word_embeddings": True}
    spec = read(tmp_path, "qwen2.5-vl-3b", text_config=text, tie_word_embeddings=False)
    assert spec.tie_word_embeddings


def test_the_queries_of_a_ministral_3_grow_with_their_position(tmp_path: Path) -> None:
    attention = read(tmp_path, "ministral-3-8b").layers[0].mixer
    assert attention.rope is not None
    assert attention.query_rope is not None
    assert (attention.rope.growth, attention.query_rope.growth) == (0.0, 0.1)
    assert attention.rope.original_max_position_embeddings == 16_384


@pytest.mark.parametrize(
    ("types", "named"),
    [
        ({"hybrid_override_pattern": "M-*"}, ("hybrid_override_pattern", 3, 4)),
        ({"layers_block_type": ["mamba", "mlp"]}, ("layers_block_type", 2, 4)),
        ({"layer_types": ["full_attention"] * 5}, ("layer_types", 5, 4)),
    ],
)
def test_types_of_another_number_of_layers_are_refused(
    tmp_path: Path, types: dict[str, Any], named: tuple[object, ...]
) -> None:
    config = {"architectures": ["NemotronHForCausalLM"], "num_hidden_layers": 4, **types}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=naming(*named)):
        read_config(tmp_path)
