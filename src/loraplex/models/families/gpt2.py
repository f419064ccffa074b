"""GPT-2: learned positions, layer norms, one fused projection of q, k and v, an MLP without a gate.

Its config.json has names of its own, its weights are stored [in, out].
"""

import dataclasses
from typing import Final

from loraplex.models.config_fields import ConfigFields
from loraplex.models.decoder_names import DecoderNames
from loraplex.models.family_config import (
    ALL_BIASED,
    LAYER_NORM,
    Traits,
    read_decoder,
    require_switches,
)
from loraplex.models.spec import ModelSpec
from loraplex.models.specs.attention import AttentionSpec

ARCHITECTURE = "GPT2LMHeadModel"

NAMES: Final = DecoderNames(
    root="transformer.",
    embedding="wte",
    positions="wpe",
    layers="h",
    input_norm="ln_1",
    feed_forward_norm="ln_2",
    final_norm="ln_f",
    qkv=("attn.c_attn",),
    o="attn.c_proj",
    up=("mlp.c_fc",),
    down="mlp.c_proj",
    # The causal mask, once more in each layer.
    ignored=r"(transformer\.)?h\.\d+\.attn\.(bias|masked_bias)",
    has_transposed_weights=True,
)

_OWN_NAMES: Final = {
    "hidden_size": "n_embd",
    "num_attention_heads": "n_head",
    "num_key_value_heads": "",
    "head_dim": "",
    "num_hidden_layers": "n_layer",
    "intermediate_size": "n_inner",
    "max_position_embeddings": "n_positions",
    "hidden_act": "activation_function",
    "rms_norm_eps": "layer_norm_epsilon",
}
_DEFAULTS: Final = {
    "max_position_embeddings": 1024,
    "hidden_act": "gelu_new",
    "tie_word_embeddings": True,
}
_NEEDED: Final = {"add_cross_attention": False}
"""Fields whose other values are not supported."""


def read_config(fields: ConfigFields) -> ModelSpec:
    """Read a config.json. Absent fields have the values of the first GPT-2, except for sizes.

    reorder_and_upcast_attn means scores in float32, which all models have.
    """
    require_switches(fields, _NEEDED)
    fields = fields.renamed(_OWN_NAMES, _DEFAULTS)
    fields = fields.renamed({}, {"intermediate_size": 4 * fields.integer("hidden_size")})
    traits = Traits(
        names=NAMES,
        ropes=(None,),
        biased=ALL_BIASED,
        norm=LAYER_NORM,
        is_gated=False,
        score_scale=None if fields.boolean("scale_attn_weights", True) else 1.0,
    )
    spec = read_decoder(fields, ARCHITECTURE, traits)
    if not fields.boolean("scale_attn_by_inverse_layer_idx", False):
        return spec
    return spec.map_mixers(AttentionSpec, _with_smaller_scale)


def _with_smaller_scale(attention: AttentionSpec, layer: int) -> AttentionSpec:
    scale = attention.head_dim**-0.5 if attention.scale is None else attention.scale
    return dataclasses.replace(attention, scale=scale / (layer + 1))
