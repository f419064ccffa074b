"""GLM 4: norms before and after the parts, half of a head turns, in interleaved pairs."""

import dataclasses
from typing import Final

from loraplex.models.config_fields import ConfigFields
from loraplex.models.decoder_names import LLAMA_NAMES
from loraplex.models.family_config import Traits, read_decoder
from loraplex.models.spec import ModelSpec
from loraplex.models.specs.attention import QKV
from loraplex.models.specs.part import NormSpec

ARCHITECTURE: Final = "Glm4ForCausalLM"

_NAMES: Final = dataclasses.replace(
    LLAMA_NAMES,
    up=("mlp.gate_up_proj",),
    attention_output_norm="post_self_attn_layernorm",
    feed_forward_norm="post_attention_layernorm",
    feed_forward_output_norm="post_mlp_layernorm",
)
_DEFAULTS: Final = {
    "max_position_embeddings": 131_072,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "partial_rotary_factor": 0.5,
}


def read_config(fields: ConfigFields) -> ModelSpec:
    """Read a config.json; `attention_bias` leaves the output projection without a bias."""
    fields = fields.renamed({}, _DEFAULTS)
    traits = Traits(
        names=_NAMES,
        is_rope_interleaved=True,
        norm=NormSpec("", 0, 1.5625e-7),
        biased=(QKV,) if fields.boolean("attention_bias", True) else (),
    )
    return read_decoder(fields, ARCHITECTURE, traits)
