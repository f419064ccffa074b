"""Cases of the families with convolutions."""

from typing import Any

import torch
from transformers import Lfm2Config, Lfm2MoeConfig

from support.families.case import FamilyCase, sizes

LINEARS = ("in_proj", "w1", "w3", "w2", "q_proj", "k_proj", "v_proj", "out_proj")
"""Convolutions and attention have an out_proj each."""
EXPERTS: dict[str, Any] = {
    "linears": LINEARS,
    "parameters": tuple(
        f"feed_forward.{weight}"
        for weight in ("gate.weight", "experts.gate_up_proj", "experts.down_proj")
    ),
}
MIXED = ["conv", "full_attention", "conv", "conv"]


def lfm2(**changes: Any) -> Lfm2Config:
    fields = sizes(
        max_position_embeddings=256,
        layer_types=MIXED,
        block_auto_adjust_ff_dim=False,
        rope_parameters={"rope_type": "default", "rope_theta": 50.0},
    )
    return Lfm2Config(**(fields | changes))


def lfm2_moe(**changes: Any) -> Lfm2MoeConfig:
    fields = sizes(
        max_position_embeddings=256,
        layer_types=MIXED,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        num_dense_layers=1,
    )
    return Lfm2MoeConfig(**(fields | changes))


def _with_biases(model: Any) -> None:
    """Fill the biases of the choice of experts, which are no parameters."""
    for name, buffer in model.named_buffers():
        if name.endswith("expert_bias"):
            buffer.copy_(torch.randn_like(buffer))


CASES = {
    "lfm2": FamilyCase(config=lfm2, linears=LINEARS, is_quick=True),
    "lfm2-adjusted": FamilyCase(
        config=lambda: lfm2(
            block_auto_adjust_ff_dim=True,
            intermediate_size=100,
            block_ffn_dim_multiplier=1.3,
            block_multiple_of=24,
            tie_word_embeddings=False,
        ),
        linears=LINEARS,
    ),
    "lfm2-biases": FamilyCase(
        config=lambda: lfm2(conv_bias=True, conv_L_cache=4, num_key_value_heads=1),
        linears=LINEARS,
    ),
    "lfm2-one-tap": FamilyCase(
        config=lambda: lfm2(conv_L_cache=1, layer_types=None, full_attn_idxs=[0, 3]),
        linears=LINEARS,
    ),
    "lfm2-long": FamilyCase(
        config=lambda: lfm2(conv_L_cache=7, layer_types=["full_attention", *["conv"] * 3]),
        linears=LINEARS,
    ),
    "lfm2-convolutions": FamilyCase(
        config=lambda: lfm2(layer_types=["conv"] * 3 + ["full_attention"], hidden_size=40),
        linears=LINEARS,
    ),
    "lfm2-moe": FamilyCase(config=lfm2_moe, is_quick=True, prepare=_with_biases, **EXPERTS),
    "lfm2-moe-plain": FamilyCase(
        config=lambda: lfm2_moe(
            use_expert_bias=False,
            norm_topk_prob=False,
            routed_scaling_factor=1.7,
            num_dense_layers=2,
            conv_bias=True,
        ),
        **EXPERTS,
    ),
    # Sums of probabilities that are no larger than what is added to them.
    "lfm2-moe-floor": FamilyCase(
        config=lambda: lfm2_moe(num_experts=5, num_experts_per_tok=3),
        prepare=_with_biases,
        embedding_factor=3.0,
        **EXPERTS,
    ),
}
