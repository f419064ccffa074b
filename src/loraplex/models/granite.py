"""Granite 3 and 4: Llama with a factor of the embedding, scores, residual additions and logits."""

import dataclasses
from typing import Final

from loraplex.models.config_fields import ConfigFields
from loraplex.models.family_config import Traits, read_decoder
from loraplex.models.llama import llama_biases
from loraplex.models.spec import ModelSpec

ARCHITECTURE: Final = "GraniteForCausalLM"


def read_config(fields: ConfigFields) -> ModelSpec:
    fields = fields.renamed({}, {"max_position_embeddings": 2048})
    traits = Traits(
        rotates_whole_heads=True,
        biased=llama_biases(fields),
        score_scale=fields.positive("attention_multiplier", 1.0),
        residual_factor=fields.positive("residual_multiplier", 1.0),
    )
    return dataclasses.replace(
        read_decoder(fields, ARCHITECTURE, traits),
        embedding_factor=fields.positive("embedding_multiplier", 1.0),
        logits_factor=1.0 / fields.positive("logits_scaling", 1.0),
    )
