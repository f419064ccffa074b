"""Phi 1 to 2: attention and feed-forward part are parallel, half of a head rotates."""

import dataclasses
from typing import Final

from loraplex.models.config_fields import ConfigFields
from loraplex.models.decoder_names import DecoderNames
from loraplex.models.family_config import ALL_BIASED, LAYER_NORM, Traits, read_decoder
from loraplex.models.spec import ModelSpec

ARCHITECTURE: Final = "PhiForCausalLM"

NAMES: Final = DecoderNames(
    feed_forward_norm="",
    final_norm="final_layernorm",
    q_norm="self_attn.q_layernorm",
    k_norm="self_attn.k_layernorm",
    o="self_attn.dense",
    up=("mlp.fc1",),
    down="mlp.fc2",
)

_OWN_NAMES: Final = {"rms_norm_eps": "layer_norm_eps"}
_DEFAULTS: Final = {
    "hidden_act": "gelu_new",
    "max_position_embeddings": 2048,
    "partial_rotary_factor": 0.5,
}


def read_config(fields: ConfigFields) -> ModelSpec:
    fields = fields.renamed(_OWN_NAMES, _DEFAULTS)
    traits = Traits(
        names=NAMES,
        biased=ALL_BIASED,
        norm=LAYER_NORM,
        head_norm=LAYER_NORM if fields.boolean("qk_layernorm", False) else None,
        is_gated=False,
        is_parallel=True,
    )
    return dataclasses.replace(read_decoder(fields, ARCHITECTURE, traits), has_lm_head_bias=True)
