"""Mistral and Ministral: one sliding window for all layers, or for those that layer_types names."""

from typing import Final

from loraplex.models.config_fields import ConfigFields
from loraplex.models.family_config import Traits, periodic_windows, read_decoder
from loraplex.models.spec import ModelSpec

ARCHITECTURE: Final = "MistralForCausalLM"
ARCHITECTURE_MIXED: Final = "MinistralForCausalLM"
"""Class of transformers for files with layer_types, whichever name they have."""


def read_config(fields: ConfigFields) -> ModelSpec:
    return _read(fields, ARCHITECTURE)


def read_config_mixed(fields: ConfigFields) -> ModelSpec:
    return _read(fields, ARCHITECTURE_MIXED)


def _read(fields: ConfigFields, architecture: str) -> ModelSpec:
    defaults = {"max_position_embeddings": 131_072, "num_key_value_heads": 8}
    fields = fields.renamed({}, defaults)
    # Without layer_types no layer ends a period: all have the window.
    windows = periodic_windows(fields, period=fields.num_layers + 1)
    return read_decoder(fields, architecture, Traits(windows=windows, rotates_whole_heads=True))
