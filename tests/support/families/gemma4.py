"""Cases of Gemma 4: layers that share keys and values, heads of two sizes, inputs of each layer."""

from collections.abc import Callable
from typing import Any

import torch
from transformers import (
    AutoModelForImageTextToText,
    Gemma4Config,
    Gemma4TextConfig,
    Gemma4UnifiedTextConfig,
)

from support.families.case import LLAMA_LINEARS, VOCAB_SIZE, FamilyCase, sizes

SLIDING, FULL = "sliding_attention", "full_attention"
FIELDS: dict[str, Any] = {
    "num_hidden_layers": 6,
    "head_dim": 16,
    "global_head_dim": 24,
    "sliding_window": 8,
    "layer_types": [SLIDING, FULL] * 3,
    "pad_token_id": 0,
    "intermediate_size": 40,
}


def gemma4(**changes: Any) -> Gemma4TextConfig:
    """Return a model whose last three layers read keys and values of the second and third."""
    own = {
        "num_kv_shared_layers": 3,
        "vocab_size_per_layer_input": VOCAB_SIZE,
        "hidden_size_per_layer_input": 12,
        "use_double_wide_mlp": True,
        "final_logit_softcapping": 30.0,
    }
    return Gemma4TextConfig(**(sizes(**FIELDS) | own | changes))


def gemma4_large(**changes: Any) -> Gemma4TextConfig:
    """Return a model without shared layers, whose layers with full attention have no v_proj."""
    own = {
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
    }
    return gemma4(**(own | changes))


def gemma4_experts(**changes: Any) -> Gemma4TextConfig:
    """Return a model like 26B-A4B: experts in addition to the dense part of each layer."""
    own = {
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 24,
    }
    return gemma4_large(**(own | changes))


def gemma4_unified(**changes: Any) -> Gemma4UnifiedTextConfig:
    own = {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
    return Gemma4UnifiedTextConfig(**(sizes(**FIELDS) | own | changes))


def gemma4_wrapper(text: Callable[[], Gemma4TextConfig] = gemma4) -> Gemma4Config:
    vision = {
        "num_hidden_layers": 1,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "patch_size": 4,
        "position_embedding_size": 16,
    }
    return Gemma4Config(
        text_config=text().to_dict(),
        vision_config=vision,
        audio_config=None,
        # The class embeds such a token as padding. Random prompts have none of them.
        image_token_id=VOCAB_SIZE,
        video_token_id=VOCAB_SIZE + 1,
        audio_token_id=VOCAB_SIZE + 2,
    )


def with_factors(model: Any) -> None:
    """Give each layer's output a factor of its own: the class has 1 for all."""
    generator = torch.Generator().manual_seed(1)
    for name, buffer in model.named_buffers():
        if name.endswith("layer_scalar"):
            buffer.copy_(0.5 + torch.rand(1, generator=generator))


def with_routers(model: Any) -> None:
    """Let choices differ and all experts count: what random ones read and give is small."""
    with_factors(model)
    for name, parameter in model.named_parameters():
        if name.endswith("router.scale"):
            parameter.mul_(4)
        if name.endswith("per_expert_scale"):
            parameter.mul_(3).add_(parameter.sign())


OWN_INPUT = (*LLAMA_LINEARS, "per_layer_input_gate", "per_layer_projection")
TEXT: dict[str, Any] = {
    "linears": OWN_INPUT,
    "outer_linears": ("per_layer_model_projection",),
    "prepare": with_factors,
}

EXPERTS: dict[str, Any] = {
    "linears": (*LLAMA_LINEARS, "proj"),  # the router's
    "parameters": ("experts.gate_up_proj", "experts.down_proj"),
    "prepare": with_routers,
}

CASES: dict[str, FamilyCase] = {
    "gemma4": FamilyCase(config=gemma4, is_quick=True, **TEXT),
    "gemma4-period": FamilyCase(
        config=lambda: gemma4(
            layer_types=None, num_hidden_layers=8, num_kv_shared_layers=2, sliding_window=5
        ),
        **TEXT,
    ),
    "gemma4-biases": FamilyCase(
        config=lambda: gemma4(
            attention_bias=True, attention_k_eq_v=True, num_global_key_value_heads=4
        ),
        **TEXT,
    ),
    "gemma4-keys-are-values": FamilyCase(config=gemma4_large, prepare=with_factors, is_quick=True),
    "gemma4-own-head": FamilyCase(
        config=lambda: gemma4_large(tie_word_embeddings=False), prepare=with_factors
    ),
    "gemma4-experts": FamilyCase(config=gemma4_experts, is_quick=True, **EXPERTS),
    "gemma4-experts-and-inputs": FamilyCase(
        config=lambda: gemma4_experts(
            hidden_size_per_layer_input=12,
            num_kv_shared_layers=3,
            use_double_wide_mlp=True,
            num_experts=9,
            top_k_experts=3,
        ),
        **(EXPERTS | {"linears": (*OWN_INPUT, "proj"), "outer_linears": TEXT["outer_linears"]}),
    ),
    "gemma4-experts-wrapper": FamilyCase(
        config=lambda: gemma4_wrapper(gemma4_experts),
        model_class=AutoModelForImageTextToText,
        scope=r".*language_model\..*",
        **EXPERTS,
    ),
    "gemma4-unified": FamilyCase(config=gemma4_unified, prepare=with_factors),
    "gemma4-unified-shared": FamilyCase(
        config=lambda: gemma4_unified(num_kv_shared_layers=3), prepare=with_factors
    ),
    "gemma4-wrapper": FamilyCase(
        config=gemma4_wrapper,
        model_class=AutoModelForImageTextToText,
        scope=r".*language_model\..*",
        is_quick=True,
        **TEXT,
    ),
}
