"""Cases of the families from Gemma to the text towers of Qwen-VL."""

from typing import Any

from transformers import Gemma2Config, Gemma3TextConfig, GemmaConfig

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
    "gemma3": FamilyCase(config=gemma3, is_quick=True),
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
}
