"""Cases of the families of 2025 that are Llama with a few differences."""

from typing import Any

from transformers import (
    ApertusConfig,
    ArceeConfig,
    Ernie4_5Config,
    Exaone4Config,
    HunYuanDenseV1Config,
    SeedOssConfig,
)

from support.families.case import FamilyCase, sizes

_ARCEE_LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj")


def seed_oss(**changes: Any) -> SeedOssConfig:
    return SeedOssConfig(**(sizes(head_dim=16, pad_token_id=None) | changes))


def arcee(**changes: Any) -> ArceeConfig:
    return ArceeConfig(**(sizes() | changes))


def apertus(**changes: Any) -> ApertusConfig:
    return ApertusConfig(**(sizes(pad_token_id=None) | changes))


def hunyuan(**changes: Any) -> HunYuanDenseV1Config:
    fields = sizes(head_dim=16, pad_token_id=None, eod_token_id=None)
    return HunYuanDenseV1Config(**(fields | changes))


def exaone4(**changes: Any) -> Exaone4Config:
    return Exaone4Config(**(sizes(sliding_window=8) | changes))


def ernie(**changes: Any) -> Ernie4_5Config:
    return Ernie4_5Config(**(sizes(head_dim=16, pad_token_id=None) | changes))


def rope(**changes: Any) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": 50.0} | changes


CASES: dict[str, FamilyCase] = {
    "seed-oss": FamilyCase(config=seed_oss, is_quick=True),
    "seed-oss-biases": FamilyCase(
        config=lambda: seed_oss(
            attention_bias=False, attention_out_bias=True, mlp_bias=True, num_key_value_heads=1
        )
    ),
    "apertus": FamilyCase(config=apertus, linears=_ARCEE_LINEARS, is_quick=True),
    "apertus-biases": FamilyCase(
        config=lambda: apertus(
            attention_bias=True,
            tie_word_embeddings=True,
            num_key_value_heads=None,
            rms_norm_eps=1e-2,
            rope_parameters=rope(),
        ),
        linears=_ARCEE_LINEARS,
    ),
    "arcee": FamilyCase(
        config=lambda: arcee(
            rope_parameters=rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=16)
        ),
        linears=_ARCEE_LINEARS,
        is_quick=True,
    ),
    "arcee-biases": FamilyCase(
        config=lambda: arcee(attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
        linears=_ARCEE_LINEARS,
    ),
    "arcee-gelu": FamilyCase(
        config=lambda: arcee(hidden_act="gelu", num_key_value_heads=4), linears=_ARCEE_LINEARS
    ),
    "hunyuan": FamilyCase(
        config=lambda: hunyuan(rope_parameters=rope(rope_type="dynamic", alpha=100.0, factor=1.0)),
        is_quick=True,
    ),
    "hunyuan-biases": FamilyCase(
        config=lambda: hunyuan(attention_bias=True, tie_word_embeddings=True, head_dim=8)
    ),
    "hunyuan-dynamic": FamilyCase(
        config=lambda: hunyuan(
            rope_parameters=rope(rope_type="dynamic", factor=2.0), num_key_value_heads=1
        )
    ),
    "exaone4": FamilyCase(config=exaone4, is_quick=True),
    "exaone4-no-windows": FamilyCase(
        config=lambda: exaone4(
            sliding_window=None,
            layer_types=["full_attention"] * 4,
            tie_word_embeddings=True,
            rope_parameters=rope(
                rope_type="llama3",
                factor=4.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=16,
            ),
        )
    ),
    "exaone4-period": FamilyCase(
        config=lambda: exaone4(sliding_window_pattern=2, sliding_window=5, num_key_value_heads=4)
    ),
    "exaone4-letters": FamilyCase(
        config=lambda: exaone4(
            sliding_window_pattern="LG",
            layer_types=["full_attention", "sliding_attention"] * 2,
            hidden_act="gelu_pytorch_tanh",
        )
    ),
    "ernie": FamilyCase(config=ernie, is_quick=True),
    "ernie-biases": FamilyCase(
        config=lambda: ernie(use_bias=True, tie_word_embeddings=False, head_dim=8)
    ),
    "ernie-theta": FamilyCase(
        config=lambda: ernie(rope_parameters=rope(), num_key_value_heads=4, rms_norm_eps=1e-2)
    ),
}
