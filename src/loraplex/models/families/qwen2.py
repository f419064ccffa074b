"""Qwen 2 and 2.5: a bias on q, k and v; the upper layers may have a sliding window."""

from loraplex.models.config_fields import ConfigFields
from loraplex.models.family_config import Traits, read_decoder, windows_by_switch
from loraplex.models.spec import ModelSpec
from loraplex.models.specs.attention import QKV

ARCHITECTURE = "Qwen2ForCausalLM"


def read_config(fields: ConfigFields) -> ModelSpec:
    fields = fields.renamed({}, {"max_position_embeddings": 32_768})
    traits = Traits(windows=windows_by_switch(fields), biased=(QKV,), rotates_whole_heads=True)
    return read_decoder(fields, ARCHITECTURE, traits)
