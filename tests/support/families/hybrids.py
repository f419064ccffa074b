"""Cases of families whose layers have a recurrence or a convolution besides attention."""

from typing import Any

from transformers import (
    AutoModelForImageTextToText,
    PretrainedConfig,
    Qwen3_5Config,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
)

from support.families.case import LLAMA_LINEARS, FamilyCase, sizes

ATTENTION_LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP_LINEARS = ("gate_proj", "up_proj", "down_proj")
DELTA_LINEARS = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj")
NEXT_LINEARS = ("in_proj_qkvz", "in_proj_ba", "out_proj")
EXPERTS = ("mlp.gate.weight", "mlp.experts.gate_up_proj", "mlp.experts.down_proj")
EXPERT_SIZES = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
}


def delta_sizes(**changes: Any) -> dict[str, Any]:
    """Fields of a model with twice as many value heads as key heads, and odd sizes of both."""
    fields = sizes(
        head_dim=16,
        max_position_embeddings=256,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=12,
        linear_value_head_dim=10,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 100.0,
            "partial_rotary_factor": 0.5,
            "mrope_section": [2, 1, 1],
            "mrope_interleaved": True,
        },
    )
    return fields | changes


def qwen3_5(**changes: Any) -> Qwen3_5TextConfig:
    return Qwen3_5TextConfig(**delta_sizes(**changes))


def qwen3_5_moe(**changes: Any) -> Qwen3_5MoeTextConfig:
    fields = delta_sizes(**EXPERT_SIZES)
    fields.pop("intermediate_size")
    return Qwen3_5MoeTextConfig(**(fields | changes))


def qwen3_next(**changes: Any) -> Qwen3NextConfig:
    fields = delta_sizes(**EXPERT_SIZES, mlp_only_layers=[0])
    fields["rope_parameters"] = {"rope_type": "default", "rope_theta": 100.0}
    return Qwen3NextConfig(**(fields | changes))


def wrapped(**changes: Any) -> PretrainedConfig:
    """Return a wrapper with a tower of images, which is left out."""
    vision = {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_heads": 2,
        "out_hidden_size": 32,
        "num_position_embeddings": 16,
    }
    text = delta_sizes(**changes)
    return Qwen3_5Config(text_config=text, vision_config=vision, tie_word_embeddings=True)


DENSE: dict[str, Any] = {"linears": (*DELTA_LINEARS, *LLAMA_LINEARS)}
MOE: dict[str, Any] = {
    "linears": (*DELTA_LINEARS, *ATTENTION_LINEARS, *MLP_LINEARS, "shared_expert_gate"),
    "parameters": EXPERTS,
}
NEXT: dict[str, Any] = {
    # PEFT takes names of MLP linears for experts, too: they are in no adapter of few modules.
    "linears": (*ATTENTION_LINEARS, *MLP_LINEARS, "shared_expert_gate", *NEXT_LINEARS),
    "parameters": EXPERTS,
}

CASES: dict[str, FamilyCase] = {
    "qwen3.5": FamilyCase(config=qwen3_5, is_quick=True, **DENSE),
    "qwen3.5-wrapper": FamilyCase(
        config=wrapped,
        scope=r".*language_model\.layers\.",
        model_class=AutoModelForImageTextToText,
        **DENSE,
    ),
    "qwen3.5-three-values": FamilyCase(
        config=lambda: qwen3_5(
            linear_num_value_heads=6,
            linear_key_head_dim=7,
            linear_value_head_dim=17,
            linear_conv_kernel_dim=2,
            attention_bias=True,
        ),
        **DENSE,
    ),
    "qwen3.5-equal-heads": FamilyCase(
        config=lambda: qwen3_5(
            linear_num_value_heads=2,
            tie_word_embeddings=True,
            layer_types=["full_attention", *["linear_attention"] * 3],
        ),
        **DENSE,
    ),
    "qwen3.5-moe": FamilyCase(config=qwen3_5_moe, is_quick=True, **MOE),
    "qwen3-next": FamilyCase(config=qwen3_next, is_quick=True, **NEXT),
    "qwen3-next-three-values": FamilyCase(
        config=lambda: qwen3_next(
            linear_num_value_heads=6,
            linear_key_head_dim=8,
            norm_topk_prob=False,
            decoder_sparse_step=2,
            mlp_only_layers=[],
        ),
        **NEXT,
    ),
}
