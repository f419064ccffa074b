"""Mistral: one sliding window for all layers, or none."""

from loraplex.core.errors import UnsupportedModelError
from loraplex.models.config import DecoderConfig
from loraplex.models.config_fields import ConfigFields
from loraplex.models.decoder_config import FamilyTraits, read_decoder

ARCHITECTURE = "MistralForCausalLM"


def read_config(fields: ConfigFields) -> DecoderConfig:
    if len(set(fields.texts("layer_types"))) > 1:
        raise UnsupportedModelError(
            f"{fields.source}: {ARCHITECTURE} with different layer_types is not supported"
        )
    window = fields.optional_integer("sliding_window")
    traits = FamilyTraits(
        layer_windows=(window,) * fields.integer("num_hidden_layers"),
        default_max_position_embeddings=131_072,
    )
    return read_decoder(fields, ARCHITECTURE, traits)
