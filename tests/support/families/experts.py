"""Cases of the families with experts."""

from typing import Any

import torch
from transformers import (
    GptOssConfig,
    GraniteMoeConfig,
    GraniteMoeSharedConfig,
    MixtralConfig,
    OlmoeConfig,
    PhimoeConfig,
    PhimoeForCausalLM,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)

from support.families.case import FamilyCase, sizes
from support.families.first import longrope

ATTENTION_LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj")


def linears(*others: str, parent: str = "mlp", router: str = "gate") -> dict[str, Any]:
    """Return what adapters of a case adapt: attention, other linear layers, router and experts."""
    weights = (f"{router}.weight", "experts.gate_up_proj", "experts.down_proj")
    return {
        "linears": ATTENTION_LINEARS + others,
        "parameters": tuple(f"{parent}.{weight}" for weight in weights),
    }


DENSE_LINEARS = ("gate_proj", "up_proj", "down_proj")
"""Those of dense layers and of Qwen's shared experts."""
MIXTRAL = QWEN3 = OLMOE = linears()
QWEN2 = linears(*DENSE_LINEARS, "shared_expert_gate")
PHI = GPT_OSS = linears(router="router")
GRANITE = linears(parent="block_sparse_moe", router="router")
GRANITE_SHARED = linears(
    "input_linear", "output_linear", parent="block_sparse_moe", router="router"
)


def mixtral(**changes: Any) -> MixtralConfig:
    fields = sizes(num_local_experts=4, num_experts_per_tok=2)
    return MixtralConfig(**(fields | changes))


def qwen2_moe(**changes: Any) -> Qwen2MoeConfig:
    fields = sizes(
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        shared_expert_intermediate_size=40,
        mlp_only_layers=[0],
    )
    return Qwen2MoeConfig(**(fields | changes))


def qwen3_moe(**changes: Any) -> Qwen3MoeConfig:
    fields = sizes(
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        mlp_only_layers=[0],
        norm_topk_prob=True,
        head_dim=16,
    )
    return Qwen3MoeConfig(**(fields | changes))


def olmoe(**changes: Any) -> OlmoeConfig:
    fields = sizes(num_experts=4, num_experts_per_tok=2, pad_token_id=None)
    return OlmoeConfig(**(fields | changes))


def phimoe(**changes: Any) -> PhimoeConfig:
    fields = sizes(
        num_local_experts=4, num_experts_per_tok=2, attention_bias=True, lm_head_bias=True
    )
    return PhimoeConfig(**(fields | changes))


def _phimoe_rope(original_length: int) -> dict[str, Any]:
    lengths = {"original_max_position_embeddings": original_length}
    return longrope(4, short_mscale=1.3, long_mscale=1.3, **lengths)


class PhimoeOfItsAuthors:
    """Model with longrope's long factors beyond the original length, unlike transformers'."""

    @staticmethod
    def from_config(config: PhimoeConfig, **options: Any) -> PhimoeForCausalLM:
        model: PhimoeForCausalLM = PhimoeForCausalLM._from_config(config, **options)  # type: ignore[no-untyped-call]
        rotary = model.model.rotary_emb
        # What the decorator of `forward` has chosen by the length.
        rotary.rope_init_fn = lambda _: (rotary.inv_freq, torch.nan)
        return model


GRANITE_FACTORS = {
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.1,
    "logits_scaling": 8.0,
}


def granite_moe(**changes: Any) -> GraniteMoeConfig:
    fields = sizes(num_local_experts=4, num_experts_per_tok=2)
    return GraniteMoeConfig(**(fields | GRANITE_FACTORS | changes))


def granite_moe_shared(**changes: Any) -> GraniteMoeSharedConfig:
    fields = sizes(num_local_experts=4, num_experts_per_tok=2, shared_intermediate_size=40)
    return GraniteMoeSharedConfig(**(fields | GRANITE_FACTORS | changes))


def gpt_oss(**changes: Any) -> GptOssConfig:
    fields = sizes(num_local_experts=4, num_experts_per_tok=2, head_dim=16, sliding_window=8)
    return GptOssConfig(**(fields | changes))


CASES: dict[str, FamilyCase] = {
    "mixtral": FamilyCase(config=mixtral, is_quick=True, **MIXTRAL),
    "mixtral-window": FamilyCase(
        config=lambda: mixtral(sliding_window=7, num_experts_per_tok=1, num_local_experts=3),
        **MIXTRAL,
    ),
    "mixtral-all-experts": FamilyCase(
        config=lambda: mixtral(num_experts_per_tok=4, hidden_act="gelu", head_dim=16),
        **MIXTRAL,
    ),
    "qwen2-moe": FamilyCase(config=qwen2_moe, is_quick=True, **QWEN2),
    "qwen2-moe-windows": FamilyCase(
        config=lambda: qwen2_moe(
            use_sliding_window=True,
            sliding_window=5,
            max_window_layers=3,
            decoder_sparse_step=2,
            mlp_only_layers=[],
        ),
        **QWEN2,
    ),
    "qwen2-moe-normalized": FamilyCase(
        config=lambda: qwen2_moe(
            norm_topk_prob=True,
            qkv_bias=False,
            tie_word_embeddings=True,
            num_experts=9,
            num_experts_per_tok=3,
        ),
        **QWEN2,
    ),
    "qwen3-moe": FamilyCase(config=qwen3_moe, is_quick=True, **QWEN3),
    "qwen3-moe-windows": FamilyCase(
        config=lambda: qwen3_moe(
            use_sliding_window=True,
            sliding_window=6,
            attention_bias=True,
            norm_topk_prob=False,
            decoder_sparse_step=3,
        ),
        **QWEN3,
    ),
    "olmoe": FamilyCase(config=olmoe, is_quick=True, **OLMOE),
    "olmoe-square": FamilyCase(config=lambda: olmoe(intermediate_size=16), **OLMOE),
    "olmoe-normalized": FamilyCase(
        config=lambda: olmoe(norm_topk_prob=True, attention_bias=True, num_key_value_heads=4),
        **OLMOE,
    ),
    "phimoe": FamilyCase(config=phimoe, is_quick=True, **PHI),
    "phimoe-long": FamilyCase(
        config=lambda: phimoe(router_jitter_noise=0.3, rope_parameters=_phimoe_rope(16)),
        model_class=PhimoeOfItsAuthors,
        **PHI,
    ),
    "phimoe-short": FamilyCase(config=lambda: phimoe(rope_parameters=_phimoe_rope(64)), **PHI),
    "phimoe-window": FamilyCase(
        config=lambda: phimoe(
            attention_bias=False,
            lm_head_bias=False,
            sliding_window=7,
            tie_word_embeddings=True,
            hidden_act="gelu",
        ),
        **PHI,
    ),
    "granite-moe": FamilyCase(config=granite_moe, is_quick=True, **GRANITE),
    "granite-moe-square": FamilyCase(
        # 2 I = N: the experts' first tensor is square.
        config=lambda: granite_moe(
            intermediate_size=16, attention_bias=True, tie_word_embeddings=True, num_local_experts=7
        ),
        **GRANITE,
    ),
    "granite-moe-shared": FamilyCase(config=granite_moe_shared, is_quick=True, **GRANITE_SHARED),
    "granite-moe-shared-none": FamilyCase(
        config=lambda: granite_moe_shared(
            shared_intermediate_size=0, hidden_act="gelu", num_key_value_heads=1
        ),
        **GRANITE,
    ),
    "gpt-oss": FamilyCase(config=gpt_oss, is_quick=True, **GPT_OSS),
    # I = N as published, and 2 I = N: a square tensor can be read either way.
    "gpt-oss-square": FamilyCase(
        config=lambda: gpt_oss(intermediate_size=32, num_experts_per_tok=1),
        **GPT_OSS,
    ),
    "gpt-oss-square-gate": FamilyCase(
        config=lambda: gpt_oss(
            intermediate_size=16,
            attention_bias=False,
            tie_word_embeddings=True,
            layer_types=["full_attention"] * 3 + ["sliding_attention"],
            rope_parameters={"rope_type": "default", "rope_theta": 50.0},
        ),
        **GPT_OSS,
    ),
    "gpt-oss-all-experts": FamilyCase(
        config=lambda: gpt_oss(num_experts_per_tok=4, sliding_window=5, num_key_value_heads=4),
        **GPT_OSS,
    ),
}
