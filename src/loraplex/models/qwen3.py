"""Qwen 3: norms on the query and key heads; the head size is set apart from the hidden size."""

from loraplex.models.config import DecoderConfig
from loraplex.models.config_fields import ConfigFields
from loraplex.models.decoder_config import FamilyTraits, read_decoder, windows_by_layer_type

ARCHITECTURE = "Qwen3ForCausalLM"


def read_config(fields: ConfigFields) -> DecoderConfig:
    attention_bias = fields.boolean("attention_bias", False)
    traits = FamilyTraits(
        layer_windows=windows_by_layer_type(fields),
        default_max_position_embeddings=32_768,
        default_head_dim=128,
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        qk_norm=True,
    )
    return read_decoder(fields, ARCHITECTURE, traits)
