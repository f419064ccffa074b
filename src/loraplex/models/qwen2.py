"""Qwen 2 and 2.5: a bias on q, k and v; the upper layers may have a sliding window."""

from loraplex.models.config import DecoderConfig
from loraplex.models.config_fields import ConfigFields
from loraplex.models.decoder_config import FamilyTraits, read_decoder, windows_by_layer_type

ARCHITECTURE = "Qwen2ForCausalLM"


def read_config(fields: ConfigFields) -> DecoderConfig:
    traits = FamilyTraits(
        layer_windows=windows_by_layer_type(fields),
        default_max_position_embeddings=32_768,
        qkv_bias=True,
    )
    return read_decoder(fields, ARCHITECTURE, traits)
