"""Mistral: one sliding window for all layers, or for those that layer_types names."""

from loraplex.models.config_fields import ConfigFields
from loraplex.models.family_config import Traits, read_decoder, sliding_layers
from loraplex.models.spec import ModelSpec

ARCHITECTURE = "MistralForCausalLM"


def read_config(fields: ConfigFields) -> ModelSpec:
    fields = fields.renamed({}, {"max_position_embeddings": 131_072})
    window = fields.optional_integer("sliding_window")
    is_sliding = sliding_layers(fields, [True] * fields.integer("num_hidden_layers"))
    windows = tuple(window if sliding else None for sliding in is_sliding)
    return read_decoder(fields, ARCHITECTURE, Traits(windows=windows))
