"""Gemma 1 to 3: an embedding scaled by the root of its size, norms that multiply by 1 + w.

Gemma 2 adds norms after the parts, soft caps and windows in every second layer; Gemma 3 norms of
the query and key heads, and one rotary embedding for the layers with a window, one for the others.
"""

import dataclasses
from typing import Final

from loraplex.core.errors import UnsupportedModelError
from loraplex.models.config_fields import ConfigFields
from loraplex.models.decoder_names import LLAMA_NAMES
from loraplex.models.family_config import (
    Traits,
    periodic_windows,
    read_decoder,
    read_text_tower,
    require_switches,
    ropes_of_windows,
)
from loraplex.models.spec import ModelSpec
from loraplex.models.specs.attention import OUTPUT, QKV
from loraplex.models.specs.part import NormSpec

ARCHITECTURE: Final = "GemmaForCausalLM"
ARCHITECTURE_2: Final = "Gemma2ForCausalLM"
ARCHITECTURE_3: Final = "Gemma3ForCausalLM"
WRAPPER_3: Final = "Gemma3ForConditionalGeneration"

_NORM: Final = NormSpec("", 0, 1e-6, weight_offset=1.0, is_rounded_once=True)
_SANDWICH: Final = dataclasses.replace(
    LLAMA_NAMES,
    attention_output_norm="post_attention_layernorm",
    feed_forward_norm="pre_feedforward_layernorm",
    feed_forward_output_norm="post_feedforward_layernorm",
)
_DEFAULTS: Final = {
    "hidden_act": "gelu_pytorch_tanh",
    "head_dim": 256,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
_SIZES_3: Final = {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131_072,
    "rope_theta": 1_000_000.0,
}
"""Sizes of a Gemma 3 that does not state them, as the text_config of its wrapper may."""


def read_config(fields: ConfigFields) -> ModelSpec:
    """Read a Gemma 1. Its "gelu" is the tanh form, as transformers takes it."""
    require_switches(fields, {"use_bidirectional_attention": False})
    fields = fields.renamed({}, {**_DEFAULTS, "num_key_value_heads": 16})
    if fields.text("hidden_act", "") == "gelu":
        fields = fields.with_values({"hidden_act": "gelu_pytorch_tanh"})
    return _read(fields, ARCHITECTURE, Traits(rotates_whole_heads=True))


def read_config_2(fields: ConfigFields) -> ModelSpec:
    require_switches(fields, {"use_bidirectional_attention": False})
    fields = fields.renamed(
        {"hidden_act": "hidden_activation"}, {**_DEFAULTS, "num_key_value_heads": 4}
    )
    traits = Traits(
        names=_SANDWICH,
        windows=periodic_windows(fields, period=2),
        rotates_whole_heads=True,
        score_scale=fields.positive("query_pre_attn_scalar", 256.0) ** -0.5,
        score_soft_cap=fields.positive_or_null("attn_logit_softcapping", 50.0),
    )
    spec = _read(fields, ARCHITECTURE_2, traits)
    return dataclasses.replace(
        spec, logits_soft_cap=fields.positive_or_null("final_logit_softcapping", 30.0)
    )


def read_config_3(fields: ConfigFields) -> ModelSpec:
    """Read a Gemma 3, or the text_config of its wrapper."""
    fields = fields.renamed({"hidden_act": "hidden_activation"}, {**_DEFAULTS, **_SIZES_3})
    if fields.positive_or_null("attn_logit_softcapping") is not None:
        # transformers ignores it, others do not: no published Gemma 3 has it.
        raise UnsupportedModelError(
            f"{fields.source}: attn_logit_softcapping of a Gemma 3 is not supported"
        )
    windows = periodic_windows(fields, fields.integer("sliding_window_pattern", 6))
    is_causal = not fields.boolean("use_bidirectional_attention", False)
    if not is_causal:
        # config.json states both sides together.
        windows = tuple(None if window is None else window // 2 + 1 for window in windows)
    traits = Traits(
        names=_SANDWICH,
        windows=windows,
        ropes=ropes_of_windows(
            fields, windows, sliding_theta=fields.number("rope_local_base_freq", 10_000.0)
        ),
        score_scale=fields.positive("query_pre_attn_scalar", 256.0) ** -0.5,
        head_norm=_NORM,
        is_causal=is_causal,
    )
    spec = _read(fields, ARCHITECTURE_3, traits)
    return dataclasses.replace(
        spec,
        logits_soft_cap=fields.positive_or_null("final_logit_softcapping"),
        # The file states the stretched length, though its rope is of type linear.
        default_max_model_len=spec.max_position_embeddings,
    )


def read_wrapper_3(fields: ConfigFields) -> ModelSpec:
    require_switches(fields.table("text_config") or fields, {"use_bidirectional_attention": False})
    return read_text_tower(fields, WRAPPER_3, read_config_3, ties=True)


def _read(fields: ConfigFields, architecture: str, traits: Traits) -> ModelSpec:
    biased = (QKV, OUTPUT) if fields.boolean("attention_bias", False) else ()
    spec = read_decoder(
        fields, architecture, dataclasses.replace(traits, norm=_NORM, biased=biased)
    )
    return dataclasses.replace(
        spec, embedding_factor=spec.hidden_size**0.5, rounds_embedding_factor=True
    )
