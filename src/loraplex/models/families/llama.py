"""Llama 1 to 3 and models of the same form: optional biases, full attention in every layer."""

from loraplex.models.config_fields import ConfigFields
from loraplex.models.family_config import Traits, read_decoder
from loraplex.models.spec import DOWN, UP, ModelSpec
from loraplex.models.specs.attention import OUTPUT, QKV

ARCHITECTURE = "LlamaForCausalLM"


def read_config(fields: ConfigFields) -> ModelSpec:
    fields = fields.renamed({}, {"max_position_embeddings": 2048})
    return read_decoder(
        fields, ARCHITECTURE, Traits(biased=llama_biases(fields), rotates_whole_heads=True)
    )


def llama_biases(fields: ConfigFields) -> tuple[str, ...]:
    """Return Traits.biased; `attention_bias` includes the output projection."""
    biased: tuple[str, ...] = ()
    if fields.boolean("attention_bias", False):
        biased += (QKV, OUTPUT)
    if fields.boolean("mlp_bias", False):
        biased += (UP, DOWN)
    return biased
