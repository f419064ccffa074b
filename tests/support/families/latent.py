"""Cases of the families with latent attention."""

from typing import Any

import torch
from transformers import (
    DeepseekV2Config,
    DeepseekV3Config,
    DeepseekV32Config,
    Glm4MoeLiteConfig,
    GlmMoeDsaConfig,
    Kimi_K25Config,
    Mistral4Config,
    Mistral4ForCausalLM,
)

from support.families.case import FamilyCase, sizes
from support.families.experts import DENSE_LINEARS
from support.families.first import WRAPPER, mistral3

EXPERTS = {
    "parameters": tuple(
        f"mlp.{weight}" for weight in ("gate.weight", "experts.gate_up_proj", "experts.down_proj")
    )
}
MIXER = ("kv_b_proj", "o_proj")
LINEARS: dict[str, Any] = {
    "linears": ("q_a_proj", "kv_a_proj_with_mqa", *DENSE_LINEARS, "q_b_proj", *MIXER),
    **EXPERTS,
}
PLAIN_QUERIES: dict[str, Any] = {
    "linears": ("q_proj", "kv_a_proj_with_mqa", *DENSE_LINEARS, *MIXER),
    **EXPERTS,
}
"""Names where queries have no latent vector."""


def _latent(**changes: Any) -> dict[str, Any]:
    return (
        sizes(
            num_key_value_heads=4,
            q_lora_rank=20,
            kv_lora_rank=24,
            qk_nope_head_dim=12,
            qk_rope_head_dim=8,
            v_head_dim=16,
            n_routed_experts=4,
            num_experts_per_tok=2,
            n_shared_experts=2,
            moe_intermediate_size=24,
            first_k_dense_replace=1,
        )
        | changes
    )


def deepseek_2(**changes: Any) -> DeepseekV2Config:
    return DeepseekV2Config(**_latent(**changes))


def deepseek_3(**changes: Any) -> DeepseekV3Config:
    return DeepseekV3Config(
        **_latent(**({"n_group": 2, "topk_group": 1, "n_shared_experts": 1} | changes))
    )


def deepseek_3_2(**changes: Any) -> DeepseekV32Config:
    """Return a model that chooses positions, of which there are fewer in all prompts."""
    fields = {"n_group": 2, "topk_group": 1, "index_head_dim": 16, "index_n_heads": 2}
    return DeepseekV32Config(**_latent(**(fields | changes)))


def glm_flash(**changes: Any) -> Glm4MoeLiteConfig:
    return Glm4MoeLiteConfig(**_latent(**({"n_shared_experts": 1} | changes)))


def glm_5(**changes: Any) -> GlmMoeDsaConfig:
    fields = {"n_shared_experts": 1, "index_head_dim": 16, "index_n_heads": 2}
    return GlmMoeDsaConfig(**_latent(**(fields | changes)))


def mistral_4(**changes: Any) -> Mistral4Config:
    """Return a model whose queries grow at the positions 16, 32 and so on."""
    fields = {
        "n_shared_experts": 1,
        "rope_parameters": yarn(llama_4_scaling_beta=0.4),
        "first_k_dense_replace": 0,
    }
    return Mistral4Config(**_latent(**(fields | changes)))


def kimi(**changes: Any) -> Kimi_K25Config:
    """Return the wrapper of Kimi K2.5, with a small tower."""
    vision = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_attention_heads": 2,
        "num_hidden_layers": 1,
        "pos_emb_height": 4,
        "pos_emb_width": 4,
    }
    return Kimi_K25Config(
        text_config=deepseek_3(**changes).to_dict(),
        vision_config=vision,
        projection_hidden_size=16,
        tie_word_embeddings=False,
    )


class LanguageModelOfMistral4:
    """transformers' automatic classes know it within a wrapper alone."""

    @staticmethod
    def from_config(config: Mistral4Config, **options: Any) -> Mistral4ForCausalLM:
        model: Mistral4ForCausalLM = Mistral4ForCausalLM._from_config(config, **options)  # type: ignore[no-untyped-call]
        return model


def yarn(**changes: Any) -> dict[str, Any]:
    return {
        "rope_type": "yarn",
        "rope_theta": 10_000.0,
        "factor": 40.0,
        "original_max_position_embeddings": 16,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    } | changes


def with_biases(model: Any) -> None:
    """Fill the biases of the choice of experts, which are no parameters."""
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(torch.randn_like(buffer))


CASES = {
    "deepseek-v2": FamilyCase(
        config=lambda: deepseek_2(
            rope_parameters=yarn(mscale=0.707, mscale_all_dim=0.9),
            topk_method="group_limited_greedy",
            n_group=2,
            topk_group=1,
            routed_scaling_factor=1.7,
        ),
        is_quick=True,
        **LINEARS,
    ),
    "deepseek-v2-lite": FamilyCase(
        config=lambda: deepseek_2(q_lora_rank=None, rope_parameters=yarn(mscale_all_dim=0.707)),
        **PLAIN_QUERIES,
    ),
    "deepseek-v2-biases": FamilyCase(
        config=lambda: deepseek_2(
            attention_bias=True, num_attention_heads=3, num_key_value_heads=3, hidden_size=36
        ),
        **LINEARS,
    ),
    "deepseek-v3": FamilyCase(
        config=lambda: deepseek_3(rope_parameters=yarn()),
        is_quick=True,
        prepare=with_biases,
        **LINEARS,
    ),
    "deepseek-v3-halves": FamilyCase(
        config=lambda: deepseek_3(
            rope_interleave=False, norm_topk_prob=False, v_head_dim=8, qk_nope_head_dim=20
        ),
        prepare=with_biases,
        **LINEARS,
    ),
    # One group, no dense layer: as Kimi K2 but for the number of dense layers.
    "kimi-k2": FamilyCase(
        config=lambda: deepseek_3(
            n_group=1, topk_group=1, first_k_dense_replace=0, routed_scaling_factor=2.827
        ),
        prepare=with_biases,
        **LINEARS,
    ),
    "kimi-k2.5": FamilyCase(
        config=lambda: kimi(n_group=1, rope_parameters=yarn()),
        prepare=with_biases,
        **WRAPPER,
        **LINEARS,
    ),
    "deepseek-v3.2": FamilyCase(
        config=lambda: deepseek_3_2(rope_parameters=yarn()),
        is_quick=True,
        prepare=with_biases,
        **LINEARS,
    ),
    "glm-4.7-flash": FamilyCase(config=glm_flash, is_quick=True, prepare=with_biases, **LINEARS),
    "glm-4.7-flash-types": FamilyCase(
        config=lambda: glm_flash(mlp_layer_types=["sparse", "dense", "sparse", "dense"]),
        prepare=with_biases,
        **LINEARS,
    ),
    "mistral4": FamilyCase(
        config=mistral_4, is_quick=True, model_class=LanguageModelOfMistral4, **LINEARS
    ),
    "mistral4-wrapper": FamilyCase(
        config=lambda: mistral3(mistral_4(), tie_word_embeddings=False), **WRAPPER, **LINEARS
    ),
    "mistral4-plain": FamilyCase(
        config=lambda: mistral_4(
            q_lora_rank=None,
            rope_interleave=False,
            norm_topk_prob=False,
            routed_scaling_factor=1.7,
            rope_parameters=yarn(llama_4_scaling_beta=0.4, mscale_all_dim=0.8),
        ),
        model_class=LanguageModelOfMistral4,
        **PLAIN_QUERIES,
    ),
    "glm-5": FamilyCase(config=glm_5, is_quick=True, prepare=with_biases, **LINEARS),
}
