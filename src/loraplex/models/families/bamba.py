"""Bamba: Llama with a state space instead of attention in most layers."""

from typing import Final

from loraplex.models.config_fields import ConfigFields
from loraplex.models.decoder_names import DecoderNames
from loraplex.models.family_config import Traits, read_decoder
from loraplex.models.spec import DOWN, UP, ModelSpec
from loraplex.models.specs.attention import OUTPUT, QKV
from loraplex.models.ssm_config import SSM_DEFAULTS, with_state_spaces

ARCHITECTURE: Final = "BambaForCausalLM"

_NAMES: Final = DecoderNames(
    feed_forward_norm="pre_ff_layernorm",
    final_norm="final_layernorm",
    up=("feed_forward.gate_proj", "feed_forward.up_proj"),
    down="feed_forward.down_proj",
)
_DEFAULTS: Final = {
    **SSM_DEFAULTS,
    "num_key_value_heads": 8,
    "max_position_embeddings": 262_144,
    "rms_norm_eps": 1e-5,
}
_ROTATED: Final = 0.5
"""Share of each head that the class in transformers always rotates."""


def read_config(fields: ConfigFields) -> ModelSpec:
    fields = fields.renamed({}, _DEFAULTS).with_values({"partial_rotary_factor": _ROTATED})
    traits = Traits(
        names=_NAMES,
        biased=(
            *((QKV, OUTPUT) if fields.boolean("attention_bias", False) else ()),
            *((UP, DOWN) if fields.boolean("mlp_bias", False) else ()),
        ),
    )
    spec = read_decoder(fields, ARCHITECTURE, traits)
    attending = fields.integers("attn_layer_indices")
    layers = frozenset(range(spec.num_layers)).difference(attending)
    return with_state_spaces(spec, fields, layers, "mamba")
