"""Cases of the families of 2025 with experts in layers of plain attention."""

from typing import Any

import torch
from transformers import (
    Ernie4_5_MoeConfig,
    Glm4MoeConfig,
    Llama4Config,
    Llama4TextConfig,
    MiniMaxM2Config,
    SolarOpenConfig,
)

from support.families.case import FamilyCase, sizes
from support.families.experts import DENSE_LINEARS, linears
from support.families.first import VISION, WRAPPER
from support.families.recent import rope

SHARED = linears() | {"linears": ("q_proj", "k_proj", *DENSE_LINEARS, "v_proj", "o_proj")}
"""Adapted parts of families whose dense layers and shared experts have the same names.

PEFT adapts gate_proj and up_proj together only, which first and last ones of a case are not.
"""


def glm4_moe(**changes: Any) -> Glm4MoeConfig:
    fields = sizes(
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        head_dim=16,
        attention_bias=True,
    )
    return Glm4MoeConfig(**(fields | changes))


def solar(**changes: Any) -> SolarOpenConfig:
    fields = sizes(n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, head_dim=16)
    del fields["intermediate_size"]
    return SolarOpenConfig(**(fields | changes))


def minimax(**changes: Any) -> MiniMaxM2Config:
    fields = sizes(num_local_experts=4, num_experts_per_tok=2, head_dim=16, rotary_dim=8)
    return MiniMaxM2Config(**(fields | changes))


def ernie_moe(**changes: Any) -> Ernie4_5_MoeConfig:
    fields = sizes(
        moe_num_experts=4, moe_k=2, moe_intermediate_size=24, pad_token_id=None, head_dim=8
    )
    return Ernie4_5_MoeConfig(**(fields | changes))


def llama4(**changes: Any) -> Llama4TextConfig:
    """Return a model whose chunks are shorter than prompts, and whose queries grow."""
    fields = sizes(
        intermediate_size_mlp=40,
        num_local_experts=4,
        head_dim=16,
        attention_chunk_size=16,
        floor_scale=5,
        attn_scale=0.4,
        interleave_moe_layer_step=2,
    )
    return Llama4TextConfig(**(fields | changes))


def llama4_wrapper(**changes: Any) -> Llama4Config:
    vision = {
        **VISION,
        "vision_output_dim": 16,
        "projector_input_dim": 16,
        "projector_output_dim": 16,
    }
    return Llama4Config(text_config=llama4(**changes).to_dict(), vision_config=vision)


LLAMA4: dict[str, Any] = {
    "linears": ("q_proj", "k_proj", *DENSE_LINEARS, "v_proj", "o_proj"),
    "parameters": ("experts.gate_up_proj", "experts.down_proj"),
}
"""The router is left out: its class returns two tensors, which PEFT cannot add to."""


def _with_biases(model: Any) -> None:
    """Fill the biases of the routers, which are buffers."""
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(0.3 * torch.randn_like(buffer))


CASES: dict[str, FamilyCase] = {
    "llama4": FamilyCase(config=llama4, is_quick=True, **LLAMA4),
    "llama4-wrapper": FamilyCase(config=llama4_wrapper, **WRAPPER, **LLAMA4),
    "llama4-all-experts": FamilyCase(
        config=lambda: llama4(
            interleave_moe_layer_step=1,
            use_qk_norm=False,
            attn_temperature_tuning=False,
            no_rope_layer_interval=2,
            num_key_value_heads=1,
            attention_bias=True,
        ),
        **LLAMA4,
    ),
    "llama4-no-chunks": FamilyCase(
        config=lambda: llama4(
            moe_layers=[1, 3],
            no_rope_layers=[1, 0, 0, 1],
            layer_types=["chunked_attention", "full_attention"] * 2,
            attention_chunk_size=64,
            tie_word_embeddings=True,
            rms_norm_eps=1e-2,
            rope_parameters=rope(
                rope_type="llama3",
                factor=4.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=16,
            ),
        ),
        **LLAMA4,
    ),
    "glm4-moe": FamilyCase(
        config=lambda: glm4_moe(use_qk_norm=True, routed_scaling_factor=2.5),
        prepare=_with_biases,
        is_quick=True,
        **SHARED,
    ),
    "glm4-moe-groups": FamilyCase(
        config=lambda: glm4_moe(
            attention_bias=False,
            n_routed_experts=8,
            n_group=4,
            topk_group=2,
            n_shared_experts=2,
            first_k_dense_replace=3,
            norm_topk_prob=False,
            tie_word_embeddings=True,
        ),
        prepare=_with_biases,
        **SHARED,
    ),
    "glm4-moe-no-dense": FamilyCase(
        config=lambda: glm4_moe(first_k_dense_replace=0, num_key_value_heads=1),
        prepare=_with_biases,
        **SHARED,
    ),
    "solar-open": FamilyCase(config=solar, prepare=_with_biases, is_quick=True, **SHARED),
    "solar-open-yarn": FamilyCase(
        config=lambda: solar(
            attention_bias=True,
            n_shared_experts=2,
            routed_scaling_factor=1.5,
            rope_parameters=rope(
                rope_type="yarn",
                factor=4.0,
                original_max_position_embeddings=16,
            ),
        ),
        prepare=_with_biases,
        **SHARED,
    ),
    "minimax-m2": FamilyCase(config=minimax, prepare=_with_biases, is_quick=True, **linears()),
    "minimax-m2-whole": FamilyCase(
        config=lambda: minimax(
            rotary_dim=16, num_experts_per_tok=1, tie_word_embeddings=True, num_key_value_heads=4
        ),
        prepare=_with_biases,
        **linears(),
    ),
    "ernie-moe": FamilyCase(config=lambda: ernie_moe(head_dim=16), is_quick=True, **SHARED),
    "ernie-moe-interval": FamilyCase(
        config=lambda: ernie_moe(
            num_hidden_layers=6,
            moe_layer_start_index=0,
            moe_layer_end_index=4,
            moe_layer_interval=2,
            moe_num_shared_experts=1,
            tie_word_embeddings=False,
        ),
        **SHARED,
    ),
    "ernie-moe-unshared": FamilyCase(
        config=lambda: ernie_moe(moe_num_shared_experts=0, num_key_value_heads=4), **SHARED
    ),
}
