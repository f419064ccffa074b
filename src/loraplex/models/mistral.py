"""Mistral: one sliding window for all layers, or none."""

from loraplex.core.errors import UnsupportedModelError
from loraplex.models.config_fields import ConfigFields
from loraplex.models.family_config import LlamaTraits, read_llama_like
from loraplex.models.spec import ModelSpec

ARCHITECTURE = "MistralForCausalLM"


def read_config(fields: ConfigFields) -> ModelSpec:
    if len(set(fields.texts("layer_types"))) > 1:
        raise UnsupportedModelError(
            f"{fields.source}: {ARCHITECTURE} with different layer_types is not supported"
        )
    window = fields.optional_integer("sliding_window")
    traits = LlamaTraits(
        layer_windows=(window,) * fields.integer("num_hidden_layers"),
        default_max_position_embeddings=131_072,
    )
    return read_llama_like(fields, ARCHITECTURE, traits)
