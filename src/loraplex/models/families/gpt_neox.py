"""GPT-NeoX and Pythia: q, k and v of a head lie side by side, a part of each head rotates."""

from typing import Final

from loraplex.models.config_fields import ConfigFields
from loraplex.models.decoder_names import DecoderNames
from loraplex.models.family_config import (
    ALL_BIASED,
    LAYER_NORM,
    Traits,
    heads_in_groups,
    read_decoder,
)
from loraplex.models.spec import DOWN, UP, ModelSpec

ARCHITECTURE: Final = "GPTNeoXForCausalLM"

NAMES: Final = DecoderNames(
    root="gpt_neox.",
    embedding="embed_in",
    final_norm="final_layer_norm",
    qkv=("attention.query_key_value",),
    o="attention.dense",
    up=("mlp.dense_h_to_4h",),
    down="mlp.dense_4h_to_h",
    lm_head="embed_out",
    other_names={"lm_head": "embed_out"},
    # The causal mask, once more in each layer, and what can be computed.
    ignored=r"(gpt_neox\.)?layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)",
)

_OWN_NAMES: Final = {
    "num_key_value_heads": "",
    "head_dim": "",
    "partial_rotary_factor": "rotary_pct",
    "rope_theta": "rotary_emb_base",
    "rms_norm_eps": "layer_norm_eps",
}
_DEFAULTS: Final = {
    "hidden_act": "gelu",
    "max_position_embeddings": 2048,
    "partial_rotary_factor": 0.25,
}


def read_config(fields: ConfigFields) -> ModelSpec:
    fields = fields.renamed(_OWN_NAMES, _DEFAULTS)
    num_heads = fields.integer("num_attention_heads")
    traits = Traits(
        names=NAMES,
        biased=ALL_BIASED if fields.boolean("attention_bias", True) else (UP, DOWN),
        norm=LAYER_NORM,
        head_order=heads_in_groups(num_heads, num_heads),
        is_gated=False,
        is_parallel=fields.boolean("use_parallel_residual", True),
    )
    return read_decoder(fields, ARCHITECTURE, traits)
