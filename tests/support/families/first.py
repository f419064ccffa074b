"""Cases of the families from Gemma to the text towers of Qwen-VL."""

from typing import Any

from transformers import (
    AutoModelForImageTextToText,
    Gemma2Config,
    Gemma3Config,
    Gemma3TextConfig,
    GemmaConfig,
    Glm4Config,
    GraniteConfig,
    Ministral3Config,
    Mistral3Config,
    MistralConfig,
    Olmo2Config,
    Olmo3Config,
    Phi3Config,
    PretrainedConfig,
    Qwen2_5_VLConfig,
    Qwen3VLConfig,
)

from support.families.case import FamilyCase, sizes


def gemma(**changes: Any) -> GemmaConfig:
    return GemmaConfig(**(sizes(head_dim=16) | changes))


def gemma2(**changes: Any) -> Gemma2Config:
    fields = sizes(head_dim=16, query_pre_attn_scalar=12, sliding_window=8)
    return Gemma2Config(**(fields | changes))


def gemma3(**changes: Any) -> Gemma3TextConfig:
    ropes = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    fields = sizes(
        head_dim=16,
        query_pre_attn_scalar=12,
        sliding_window=8,
        layer_types=["sliding_attention"] * 2 + ["full_attention", "sliding_attention"],
        rope_parameters=ropes,
    )
    return Gemma3TextConfig(**(fields | changes))


def phi3(**changes: Any) -> Phi3Config:
    return Phi3Config(**(sizes(pad_token_id=0) | changes))


def longrope(num_frequencies: int, **changes: Any) -> dict[str, Any]:
    fields = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0 + 0.1 * i for i in range(num_frequencies)],
        "long_factor": [2.0 + 0.7 * i for i in range(num_frequencies)],
    }
    return fields | changes


def granite(**changes: Any) -> GraniteConfig:
    factors = {
        "embedding_multiplier": 12.0,
        "residual_multiplier": 0.22,
        "attention_multiplier": 0.1,
        "logits_scaling": 8.0,
    }
    return GraniteConfig(**(sizes() | factors | changes))


def olmo2(**changes: Any) -> Olmo2Config:
    return Olmo2Config(**(sizes(pad_token_id=None) | changes))


def olmo3(**changes: Any) -> Olmo3Config:
    return Olmo3Config(**(sizes(pad_token_id=None, sliding_window=8) | changes))


def glm4(**changes: Any) -> Glm4Config:
    return Glm4Config(**(sizes(head_dim=8, pad_token_id=0) | changes))


MINISTRAL_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 12,
    "beta_fast": 4.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.4,
}
VISION = {
    "num_hidden_layers": 1,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 2,
    "patch_size": 14,
    "image_size": 28,
}
QWEN_VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 2,
    "out_hidden_size": 32,
}


def mistral3(text: PretrainedConfig, **changes: Any) -> Mistral3Config:
    vision = {**VISION, "model_type": "pixtral", "head_dim": 8}
    return Mistral3Config(text_config=text.to_dict(), vision_config=vision, **changes)


def gemma3_wrapper(**changes: Any) -> Gemma3Config:
    vision = {**VISION, "model_type": "siglip_vision_model"}
    return Gemma3Config(
        text_config=gemma3(**changes).to_dict(),
        vision_config=vision,
        mm_tokens_per_image=4,
        image_token_index=96,
        boi_token_index=95,
        eoi_token_index=94,
    )


def qwen_text(**changes: Any) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
    return sizes(rope_parameters=rope, pad_token_id=None) | changes


def qwen2_5_vl(**changes: Any) -> Qwen2_5_VLConfig:
    text = qwen_text(**changes)
    return Qwen2_5_VLConfig(text_config=text, vision_config=QWEN_VISION)


def qwen3_vl(*, ties: bool = False, **changes: Any) -> Qwen3VLConfig:
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}
    text = qwen_text(head_dim=16, rope_parameters=rope) | changes
    vision = {**QWEN_VISION, "deepstack_visual_indexes": [0], "num_position_embeddings": 16}
    return Qwen3VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=ties)


PHI3_LINEARS = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
GLM4_LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_up_proj", "down_proj")
WRAPPER: dict[str, Any] = {
    "scope": r".*language_model\..*",
    "model_class": AutoModelForImageTextToText,
}


CASES: dict[str, FamilyCase] = {
    "gemma": FamilyCase(config=gemma, is_quick=True),
    # The square root of 40 is no bfloat16.
    "gemma-erf-in-name-only": FamilyCase(
        config=lambda: gemma(hidden_act="gelu", hidden_size=40, num_key_value_heads=1)
    ),
    "gemma-biases": FamilyCase(config=lambda: gemma(attention_bias=True, num_key_value_heads=4)),
    "gemma-own-head": FamilyCase(config=lambda: gemma(tie_word_embeddings=False, head_dim=6)),
    "gemma-theta": FamilyCase(
        config=lambda: gemma(rope_parameters={"rope_type": "default", "rope_theta": 50.0})
    ),
    "gemma-long": FamilyCase(
        config=lambda: gemma(
            rope_parameters={"rope_type": "linear", "rope_theta": 100.0, "factor": 3.0}
        )
    ),
    "gemma2": FamilyCase(config=gemma2, is_quick=True),
    "gemma2-small-caps": FamilyCase(
        config=lambda: gemma2(attn_logit_softcapping=1.5, final_logit_softcapping=2.0)
    ),
    "gemma2-no-caps": FamilyCase(
        config=lambda: gemma2(attn_logit_softcapping=None, final_logit_softcapping=None)
    ),
    "gemma2-types": FamilyCase(
        config=lambda: gemma2(
            layer_types=["full_attention"] * 3 + ["sliding_attention"], sliding_window=5
        )
    ),
    "gemma2-biases": FamilyCase(
        config=lambda: gemma2(attention_bias=True, num_key_value_heads=1, head_dim=10)
    ),
    "gemma2-own-head": FamilyCase(config=lambda: gemma2(tie_word_embeddings=False)),
    "gemma3": FamilyCase(config=gemma3),
    "gemma3-period": FamilyCase(
        config=lambda: gemma3(layer_types=None, sliding_window_pattern=3, sliding_window=3)
    ),
    "gemma3-caps": FamilyCase(config=lambda: gemma3(final_logit_softcapping=2.0)),
    "gemma3-biases": FamilyCase(
        config=lambda: gemma3(attention_bias=True, head_dim=10, num_key_value_heads=4)
    ),
    "gemma3-defaults": FamilyCase(
        config=lambda: gemma3(rope_parameters=None, query_pre_attn_scalar=256)
    ),
    "gemma3-yarn": FamilyCase(
        config=lambda: gemma3(
            rope_parameters={
                "full_attention": {
                    "rope_type": "yarn",
                    "rope_theta": 1e4,
                    "factor": 4.0,
                    "original_max_position_embeddings": 16,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 30.0},
            }
        )
    ),
    "gemma3-wrapper": FamilyCase(config=gemma3_wrapper, is_quick=True, **WRAPPER),
    "phi3": FamilyCase(
        config=lambda: phi3(
            original_max_position_embeddings=16,
            sliding_window=18,
            rope_parameters=longrope(2, partial_rotary_factor=0.5),
        ),
        linears=PHI3_LINEARS,
        is_quick=True,
    ),
    "phi3-short": FamilyCase(
        config=lambda: phi3(original_max_position_embeddings=64, rope_parameters=longrope(4)),
        linears=PHI3_LINEARS,
    ),
    "phi3-su": FamilyCase(
        config=lambda: phi3(
            original_max_position_embeddings=16,
            rope_scaling=longrope(4, rope_type="su", original_max_position_embeddings=16),
        ),
        linears=PHI3_LINEARS,
    ),
    "phi3-plain": FamilyCase(config=phi3, linears=PHI3_LINEARS),
    "phi3-tied": FamilyCase(
        config=lambda: phi3(tie_word_embeddings=True, num_key_value_heads=1, hidden_size=40),
        linears=PHI3_LINEARS,
    ),
    "phi3-window": FamilyCase(
        config=lambda: phi3(sliding_window=5, hidden_act="gelu_pytorch_tanh"),
        linears=PHI3_LINEARS,
    ),
    "ministral3": FamilyCase(
        config=lambda: Ministral3Config(**sizes(head_dim=16, rope_parameters=MINISTRAL_ROPE)),
    ),
    "ministral3-window": FamilyCase(
        config=lambda: Ministral3Config(
            **sizes(
                head_dim=8,
                sliding_window=7,
                tie_word_embeddings=True,
                rope_parameters=MINISTRAL_ROPE | {"mscale": 0.7, "llama_4_scaling_beta": 1.0},
            )
        ),
    ),
    "ministral3-wrapper": FamilyCase(
        config=lambda: mistral3(
            Ministral3Config(**sizes(head_dim=16, rope_parameters=MINISTRAL_ROPE))
        ),
        is_quick=True,
        **WRAPPER,
    ),
    "mistral3": FamilyCase(
        config=lambda: mistral3(MistralConfig(**sizes(head_dim=16, sliding_window=None))),
        **WRAPPER,
    ),
    "mistral3-own-head": FamilyCase(
        config=lambda: mistral3(
            MistralConfig(**sizes(head_dim=8, sliding_window=6)), tie_word_embeddings=False
        ),
        **WRAPPER,
    ),
    "mistral3-theta": FamilyCase(
        config=lambda: mistral3(
            MistralConfig(
                **sizes(rope_parameters={"rope_type": "default", "rope_theta": 50.0}),
                sliding_window=None,
            )
        ),
        **WRAPPER,
    ),
    "granite": FamilyCase(config=granite, is_quick=True),
    "granite-tied": FamilyCase(
        config=lambda: granite(tie_word_embeddings=True, residual_multiplier=0.7)
    ),
    "granite-biases": FamilyCase(config=lambda: granite(attention_bias=True, mlp_bias=True)),
    "granite-defaults": FamilyCase(config=lambda: GraniteConfig(**sizes())),
    "granite-gelu": FamilyCase(
        config=lambda: granite(hidden_act="gelu", num_key_value_heads=1, logits_scaling=0.5)
    ),
    "granite-odd": FamilyCase(
        config=lambda: granite(hidden_size=40, intermediate_size=44, num_key_value_heads=4)
    ),
    "olmo2": FamilyCase(config=olmo2),
    "olmo2-biases": FamilyCase(config=lambda: olmo2(attention_bias=True)),
    "olmo2-one-head": FamilyCase(config=lambda: olmo2(num_key_value_heads=1)),
    "olmo2-all-heads": FamilyCase(config=lambda: olmo2(num_key_value_heads=None)),
    "olmo2-tied": FamilyCase(config=lambda: olmo2(tie_word_embeddings=True, hidden_size=40)),
    "olmo2-rope": FamilyCase(
        config=lambda: olmo2(
            rope_parameters={"rope_type": "linear", "rope_theta": 100.0, "factor": 3.0},
            hidden_act="relu",
        )
    ),
    "olmo3": FamilyCase(
        config=lambda: olmo3(
            rope_parameters={
                "full_attention": {
                    "rope_type": "yarn",
                    "rope_theta": 1e4,
                    "factor": 4.0,
                    "original_max_position_embeddings": 16,
                    "beta_fast": 4.0,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
            },
        ),
        is_quick=True,
    ),
    "olmo3-defaults": FamilyCase(config=olmo3),
    "olmo3-old": FamilyCase(
        config=lambda: olmo3(
            rope_theta=1e3,
            rope_scaling={
                "rope_type": "yarn",
                "factor": 8.0,
                "original_max_position_embeddings": 16,
            },
        )
    ),
    "olmo3-types": FamilyCase(
        config=lambda: olmo3(
            layer_types=["full_attention", "sliding_attention"] * 2, num_key_value_heads=4
        )
    ),
    "olmo3-biases": FamilyCase(config=lambda: olmo3(attention_bias=True, sliding_window=3)),
    "olmo3-no-window": FamilyCase(config=lambda: olmo3(layer_types=["full_attention"] * 4)),
    "glm4": FamilyCase(config=glm4, linears=GLM4_LINEARS, is_quick=True),
    "glm4-no-biases": FamilyCase(
        config=lambda: glm4(attention_bias=False, num_key_value_heads=1), linears=GLM4_LINEARS
    ),
    "glm4-whole": FamilyCase(
        config=lambda: glm4(
            rope_parameters={
                "rope_type": "default",
                "rope_theta": 1e3,
                "partial_rotary_factor": 1.0,
            }
        ),
        linears=GLM4_LINEARS,
    ),
    "glm4-quarter": FamilyCase(
        config=lambda: glm4(
            head_dim=16,
            rope_parameters={
                "rope_type": "default",
                "rope_theta": 1e2,
                "partial_rotary_factor": 0.25,
            },
        ),
        linears=GLM4_LINEARS,
    ),
    "glm4-tied": FamilyCase(
        config=lambda: glm4(tie_word_embeddings=True, hidden_size=40), linears=GLM4_LINEARS
    ),
    "glm4-gelu": FamilyCase(
        config=lambda: glm4(hidden_act="gelu", num_key_value_heads=4, rms_norm_eps=1e-3),
        linears=GLM4_LINEARS,
    ),
    "qwen2.5-vl": FamilyCase(config=qwen2_5_vl, is_quick=True, **WRAPPER),
    "qwen2.5-vl-windows": FamilyCase(
        config=lambda: qwen2_5_vl(use_sliding_window=True, sliding_window=7, max_window_layers=2),
        **WRAPPER,
    ),
    "qwen2.5-vl-tied": FamilyCase(
        config=lambda: qwen2_5_vl(tie_word_embeddings=True, num_key_value_heads=4), **WRAPPER
    ),
    "qwen3-vl": FamilyCase(config=qwen3_vl, is_quick=True, **WRAPPER),
    "qwen3-vl-tied": FamilyCase(config=lambda: qwen3_vl(ties=True), **WRAPPER),
    "qwen3-vl-biases": FamilyCase(
        config=lambda: qwen3_vl(attention_bias=True, num_key_value_heads=1), **WRAPPER
    ),
}
