"""Cases of the families with experts."""

from typing import Any

from transformers import MixtralConfig, OlmoeConfig, Qwen2MoeConfig, Qwen3MoeConfig

from support.families.case import LLAMA_LINEARS, FamilyCase, sizes

ATTENTION_LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj")
SHARED_LINEARS = (*LLAMA_LINEARS, "shared_expert_gate")
"""Those of attention, dense layers and shared experts."""


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


CASES: dict[str, FamilyCase] = {
    "mixtral": FamilyCase(config=mixtral, linears=ATTENTION_LINEARS, is_quick=True),
    "mixtral-window": FamilyCase(
        config=lambda: mixtral(sliding_window=7, num_experts_per_tok=1, num_local_experts=3),
        linears=ATTENTION_LINEARS,
    ),
    "mixtral-all-experts": FamilyCase(
        config=lambda: mixtral(num_experts_per_tok=4, hidden_act="gelu", head_dim=16),
        linears=ATTENTION_LINEARS,
    ),
    "qwen2-moe": FamilyCase(config=qwen2_moe, linears=SHARED_LINEARS, is_quick=True),
    "qwen2-moe-windows": FamilyCase(
        config=lambda: qwen2_moe(
            use_sliding_window=True,
            sliding_window=5,
            max_window_layers=3,
            decoder_sparse_step=2,
            mlp_only_layers=[],
        ),
        linears=SHARED_LINEARS,
    ),
    "qwen2-moe-normalized": FamilyCase(
        config=lambda: qwen2_moe(
            norm_topk_prob=True,
            qkv_bias=False,
            tie_word_embeddings=True,
            num_experts=9,
            num_experts_per_tok=3,
        ),
        linears=SHARED_LINEARS,
    ),
    "qwen3-moe": FamilyCase(config=qwen3_moe, linears=ATTENTION_LINEARS, is_quick=True),
    "qwen3-moe-windows": FamilyCase(
        config=lambda: qwen3_moe(
            use_sliding_window=True,
            sliding_window=6,
            attention_bias=True,
            norm_topk_prob=False,
            decoder_sparse_step=3,
        ),
        linears=ATTENTION_LINEARS,
    ),
    "olmoe": FamilyCase(config=olmoe, linears=ATTENTION_LINEARS, is_quick=True),
    "olmoe-square": FamilyCase(
        config=lambda: olmoe(intermediate_size=16), linears=ATTENTION_LINEARS
    ),
    "olmoe-normalized": FamilyCase(
        config=lambda: olmoe(norm_topk_prob=True, attention_bias=True, num_key_value_heads=4),
        linears=ATTENTION_LINEARS,
    ),
}
