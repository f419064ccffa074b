"""Bloom: ALiBi, a norm of the embedding, and q, k and v of a head side by side."""

from typing import Final

from loraplex.models.config_fields import ConfigFields
from loraplex.models.decoder_names import DecoderNames
from loraplex.models.family_config import (
    ALL_BIASED,
    LAYER_NORM,
    Traits,
    alibi_slopes,
    heads_in_groups,
    read_decoder,
    require_switches,
)
from loraplex.models.spec import ModelSpec

ARCHITECTURE: Final = "BloomForCausalLM"

NAMES: Final = DecoderNames(
    root="transformer.",
    embedding="word_embeddings",
    embedding_norm="word_embeddings_layernorm",
    layers="h",
    final_norm="ln_f",
    qkv=("self_attention.query_key_value",),
    o="self_attention.dense",
    up=("mlp.dense_h_to_4h",),
    down="mlp.dense_4h_to_h",
)

_OWN_NAMES: Final = {
    "head_dim": "",
    "hidden_act": "",
    "intermediate_size": "",
    "num_key_value_heads": "",
    "max_position_embeddings": "seq_length",
    "rms_norm_eps": "layer_norm_epsilon",
}
_OTHER_NAMES: Final = {
    "hidden_size": "n_embed",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
}
"""Names that files may have in addition or instead."""
_DEFAULTS: Final = {
    "hidden_act": "gelu_pytorch_tanh",
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}
_NEEDED: Final = {
    "apply_residual_connection_post_layernorm": False,
    "slow_but_exact": False,  # transformers leaves out biases with it
}


def read_config(fields: ConfigFields) -> ModelSpec:
    require_switches(fields, _NEEDED)
    other_names = {name: own for name, own in _OTHER_NAMES.items() if own in fields}
    fields = fields.renamed({**_OWN_NAMES, **other_names}, _DEFAULTS)
    fields = fields.renamed({}, {"intermediate_size": 4 * fields.integer("hidden_size")})
    num_heads = fields.integer("num_attention_heads")
    traits = Traits(
        names=NAMES,
        ropes=(None,),
        alibi_slopes=alibi_slopes(num_heads),
        biased=ALL_BIASED,
        norm=LAYER_NORM,
        head_order=heads_in_groups(num_heads, num_heads),
        is_gated=False,
    )
    return read_decoder(fields, ARCHITECTURE, traits)
