"""Arcee's AFM: Llama whose feed-forward part has no gate, and a squared ReLU."""

import dataclasses
from typing import Final

from loraplex.models.config_fields import ConfigFields
from loraplex.models.decoder_names import LLAMA_NAMES
from loraplex.models.families.llama import llama_biases
from loraplex.models.family_config import RMS_NORM, Traits, read_decoder
from loraplex.models.spec import ModelSpec

ARCHITECTURE: Final = "ArceeForCausalLM"

_DEFAULTS: Final = {"max_position_embeddings": 4096, "hidden_act": "relu2"}


def read_config(fields: ConfigFields) -> ModelSpec:
    fields = fields.renamed({}, _DEFAULTS)
    traits = Traits(
        names=dataclasses.replace(LLAMA_NAMES, up=("mlp.up_proj",)),
        biased=llama_biases(fields),
        norm=dataclasses.replace(RMS_NORM, eps=1e-5),
        is_gated=False,
        rotates_whole_heads=True,
    )
    return read_decoder(fields, ARCHITECTURE, traits)
