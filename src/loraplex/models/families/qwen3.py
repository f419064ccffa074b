"""Qwen 3: norms on the query and key heads; the head size is set apart from the hidden size."""

from loraplex.models.config_fields import ConfigFields
from loraplex.models.family_config import RMS_NORM, Traits, read_decoder, windows_by_switch
from loraplex.models.spec import ModelSpec
from loraplex.models.specs.attention import OUTPUT, QKV

ARCHITECTURE = "Qwen3ForCausalLM"


def read_config(fields: ConfigFields) -> ModelSpec:
    fields = fields.renamed({}, {"max_position_embeddings": 32_768})
    traits = Traits(
        windows=windows_by_switch(fields),
        head_dim=128,
        rotates_whole_heads=True,
        biased=(QKV, OUTPUT) if fields.boolean("attention_bias", False) else (),
        head_norm=RMS_NORM,
    )
    return read_decoder(fields, ARCHITECTURE, traits)
