"""Latent attention by the configurations of published models: sizes, caches, ranks and refusals."""

import dataclasses
import math
from typing import Any

import pytest
import torch

from loraplex.core.errors import ConfigError, UnsupportedModelError
from loraplex.core.weight_precision import WeightPrecision
from loraplex.execution.sizing.kv import block_bytes, size_kv, wanted_model_len
from loraplex.execution.sizing.settings import RunnerSettings
from loraplex.execution.weights.size import weights_size
from loraplex.models.config_fields import ConfigFields
from loraplex.models.linear_group import TensorShard
from loraplex.models.parameters import checkpoint_shapes
from loraplex.models.registry import ARCHITECTURES
from loraplex.models.rope import RotaryTable
from loraplex.models.sharding import shard
from loraplex.models.spec import ModelSpec
from loraplex.models.specs.latent import LATENT_DOWN, LATENT_HEADS, LATENT_OUT, LatentSpec


def _yarn(**changes: Any) -> dict[str, Any]:
    return {
        "type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    } | changes


_SHARED: dict[str, Any] = {
    "attention_bias": False,
    "hidden_act": "silu",
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "moe_layer_freq": 1,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
_THIRD: dict[str, Any] = _SHARED | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "first_k_dense_replace": 3,
    "hidden_size": 7168,
    "intermediate_size": 18_432,
    "max_position_embeddings": 163_840,
    "moe_intermediate_size": 2048,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "rope_scaling": _yarn(),
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "vocab_size": 129_280,
}
MODELS: dict[str, tuple[dict[str, Any], float]] = {
    "deepseek-v2-lite": (
        _SHARED
        | {
            "architectures": ["DeepseekV2ForCausalLM"],
            "first_k_dense_replace": 1,
            "hidden_size": 2048,
            "intermediate_size": 10_944,
            "max_position_embeddings": 163_840,
            "moe_intermediate_size": 1408,
            "n_group": 1,
            "n_routed_experts": 64,
            "n_shared_experts": 2,
            "norm_topk_prob": False,
            "num_attention_heads": 16,
            "num_experts_per_tok": 6,
            "num_hidden_layers": 27,
            "num_key_value_heads": 16,
            "q_lora_rank": None,
            "rope_scaling": _yarn(mscale=0.707, mscale_all_dim=0.707),
            "routed_scaling_factor": 1.0,
            "scoring_func": "softmax",
            "topk_group": 1,
            "topk_method": "greedy",
            "vocab_size": 102_400,
        },
        15.7e9,
    ),
    "deepseek-v3": (_THIRD, 671e9),
    "kimi-k2": (
        _THIRD
        | {
            "first_k_dense_replace": 1,
            "max_position_embeddings": 131_072,
            "n_group": 1,
            "n_routed_experts": 384,
            "num_attention_heads": 64,
            "num_key_value_heads": 64,
            "num_nextn_predict_layers": 0,
            "rope_scaling": _yarn(factor=32.0),
            "rope_theta": 50_000.0,
            "routed_scaling_factor": 2.827,
            "topk_group": 1,
            "vocab_size": 163_840,
        },
        1026e9,
    ),
    "deepseek-v3.2": (
        _THIRD
        | {
            "architectures": ["DeepseekV32ForCausalLM"],
            "index_head_dim": 128,
            "index_n_heads": 64,
            "index_topk": 2048,
        },
        671e9,
    ),
    "glm-5": (
        _SHARED
        | {
            "architectures": ["GlmMoeDsaForCausalLM"],
            "first_k_dense_replace": 3,
            "hidden_size": 6144,
            "index_head_dim": 128,
            "index_n_heads": 32,
            "index_topk": 2048,
            "indexer_rope_interleave": True,
            "intermediate_size": 12_288,
            "max_position_embeddings": 202_752,
            "moe_intermediate_size": 2048,
            "n_group": 1,
            "n_routed_experts": 256,
            "n_shared_experts": 1,
            "norm_topk_prob": True,
            "num_attention_heads": 64,
            "num_experts_per_tok": 8,
            "num_hidden_layers": 78,
            "num_key_value_heads": 64,
            "num_nextn_predict_layers": 1,
            "q_lora_rank": 2048,
            "qk_nope_head_dim": 192,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {"rope_theta": 1_000_000, "rope_type": "default"},
            "routed_scaling_factor": 2.5,
            "scoring_func": "sigmoid",
            "topk_group": 1,
            "topk_method": "noaux_tc",
            "v_head_dim": 256,
            "vocab_size": 154_880,
        },
        744e9,
    ),
    # The defaults of the classes are those of GLM 4.7 Flash and Mistral Small 4.
    "glm-4.7-flash": ({"architectures": ["Glm4MoeLiteForCausalLM"]}, 29.94e9),
    "mistral-small-4": ({"architectures": ["Mistral4ForCausalLM"]}, 119e9),
}
"""config.json, and the number of parameters without layers that draft tokens."""


def read(name: str, **changes: Any) -> ModelSpec:
    fields = MODELS[name][0] | changes
    return ARCHITECTURES[fields["architectures"][0]](ConfigFields(fields, "config.json"))


@pytest.mark.parametrize("name", MODELS)
def test_as_many_parameters_as_published(name: str) -> None:
    total = sum(map(math.prod, checkpoint_shapes(read(name)).values()))
    assert total == pytest.approx(MODELS[name][1], rel=2e-3)


def test_a_latent_cache_is_a_tenth_of_that_of_all_heads() -> None:
    spec = read("deepseek-v2-lite")
    (latent, *_), num_layers = list(spec.mixers_of(LatentSpec)), spec.num_layers
    of_head = latent.key_size + latent.rope_size + latent.value_size
    of_heads = 16 * num_layers * latent.num_heads * of_head * torch.bfloat16.itemsize
    own = block_bytes(spec, 16, torch.bfloat16)
    assert own == 16 * num_layers * 576 * 2
    assert own <= 0.12 * of_heads


def test_scores_are_scaled_for_stretched_lengths() -> None:
    """The formula of DeepSeek's own code: the factor's logarithm, squared."""
    (latent, *_) = read("deepseek-v3").mixers_of(LatentSpec)
    assert latent.scale == pytest.approx(192**-0.5 * (0.1 * math.log(40) + 1) ** 2)
    (plain, *_) = read("deepseek-v3", rope_scaling=None).mixers_of(LatentSpec)
    assert plain.scale == 192**-0.5


def test_layers_that_draft_tokens_and_indexers_are_left_out() -> None:
    third, sparse = read("deepseek-v3").names, read("deepseek-v3.2").names
    assert third.canonical("model.layers.61.self_attn.q_a_proj.weight") is None
    own = "model.layers.60.self_attn.q_a_proj.weight"
    assert third.canonical(own) == own
    assert sparse.canonical("model.layers.0.self_attn.indexer.wk.weight") is None


def test_ranks_divide_the_heads_and_share_the_latent() -> None:
    spec = read("deepseek-v3")
    part = shard(spec, TensorShard(1, 4)).layers[5]
    groups = part.linears
    assert isinstance(part.mixer, LatentSpec)
    assert part.mixer.num_heads == 32
    assert part.mixer.caches() == spec.layers[5].mixers[0].caches()
    assert groups[LATENT_DOWN] == spec.layers[5].linears[LATENT_DOWN]
    assert groups[LATENT_HEADS].outputs == {"kv_b_proj": 32 * 256}
    assert groups[LATENT_OUT].in_features == 32 * 128
    with pytest.raises(ConfigError, match="128 heads of latent attention"):
        shard(spec, TensorShard(0, 3))


def test_weights_that_are_kept_twice_count_twice() -> None:
    spec = read("deepseek-v2-lite")
    whole = weights_size(spec, torch.bfloat16, WeightPrecision.NATIVE)

    def once(layer: Any) -> Any:
        groups = {
            name: dataclasses.replace(group, is_taken_apart=False)
            for name, group in layer.linears.items()
        }
        return dataclasses.replace(layer, linears=groups)

    plain = dataclasses.replace(spec, layers=tuple(map(once, spec.layers)))
    own = whole - weights_size(plain, torch.bfloat16, WeightPrecision.NATIVE)
    assert own == 27 * 16 * 256 * 512 * 2


def test_longer_sequences_than_sparse_attention_allows_are_refused() -> None:
    spec = read("deepseek-v3.2")
    assert spec.default_max_model_len == 2048
    with pytest.raises(ConfigError, match=r"2049.*index_topk \(2048\).*sparse"):
        wanted_model_len(RunnerSettings(max_model_len=2049), spec)
    assert read("deepseek-v3").default_max_model_len == 163_840


def test_a_whole_query_grows_where_a_file_says_so() -> None:
    (latent, *_) = read("mistral-small-4").mixers_of(LatentSpec)
    growth = latent.query_growth
    assert growth is not None
    assert (growth.growth, growth.original_max_position_embeddings) == (0.1, 8192)
    assert latent.ropes() == {latent.rope: 64, growth: 128}
    table = RotaryTable(
        growth,
        growth.rotary_dim(128),
        max_position_embeddings=1,
        max_model_len=24_577,
        device=torch.device("cpu"),
    )
    factors = [1.0, 1.0, 1 + 0.1 * math.log(2), 1 + 0.1 * math.log(4)]
    for position, factor in zip((0, 8191, 8192, 24_576), factors, strict=True):
        assert table.cos[position] == pytest.approx(torch.full((64,), factor))
    assert not table.sin.any()


def test_the_wrapper_of_mistral_3_may_have_mistral_4() -> None:
    fields = {
        "architectures": ["Mistral3ForConditionalGeneration"],
        "text_config": {"model_type": "mistral4", "num_hidden_layers": 2},
    }
    spec = ARCHITECTURES[fields["architectures"][0]](ConfigFields(fields, "config.json"))
    assert len(list(spec.mixers_of(LatentSpec))) == 2
    own = "model.layers.0.self_attn.kv_b_proj.weight"
    assert spec.names.canonical(f"language_model.{own}") == own


def test_int8_caches_are_refused() -> None:
    with pytest.raises(ConfigError, match="kv_dtype int8"):
        size_kv(RunnerSettings(num_blocks=4), read("deepseek-v2-lite"), torch.int8)


@pytest.mark.parametrize(
    ("name", "changes", "error", "said"),
    [
        ("deepseek-v2-lite", {"topk_method": "noaux_tc"}, UnsupportedModelError, "topk_method"),
        ("deepseek-v2-lite", {"norm_topk_prob": True}, UnsupportedModelError, "norm_topk_prob"),
        ("deepseek-v3", {"scoring_func": "softmax"}, UnsupportedModelError, "scoring_func"),
        ("deepseek-v3", {"topk_group": 9}, ConfigError, "topk_group must be at most n_group"),
        ("deepseek-v3", {"n_group": 7}, ConfigError, "must be a multiple of n_group"),
        ("deepseek-v3", {"num_experts_per_tok": 257}, ConfigError, "at most n_routed_experts"),
        ("mistral-small-4", {"n_group": 2}, UnsupportedModelError, "n_group 2"),
        ("deepseek-v3", {"kv_lora_rank": 0}, ConfigError, "kv_lora_rank must be at least 1"),
    ],
)
def test_refused_fields(
    name: str, changes: dict[str, Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        read(name, **changes)
