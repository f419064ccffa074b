"""Seed-OSS: Llama with biases of queries, keys and values, and heads of a size of their own."""

from typing import Final

from loraplex.models.config_fields import ConfigFields
from loraplex.models.family_config import Traits, read_decoder
from loraplex.models.spec import DOWN, UP, ModelSpec
from loraplex.models.specs.attention import OUTPUT, QKV

ARCHITECTURE: Final = "SeedOssForCausalLM"

_DEFAULTS: Final = {
    "max_position_embeddings": 524_288,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
_BIASES: Final = (
    ("attention_bias", True, (QKV,)),
    ("attention_out_bias", False, (OUTPUT,)),
    ("mlp_bias", False, (UP, DOWN)),
)
"""Fields, their defaults, and the groups that each is about."""


def read_config(fields: ConfigFields) -> ModelSpec:
    fields = fields.renamed({}, _DEFAULTS)
    biased = (
        group
        for name, default, groups in _BIASES
        if fields.boolean(name, default)
        for group in groups
    )
    traits = Traits(biased=tuple(biased), rotates_whole_heads=True)
    return read_decoder(fields, ARCHITECTURE, traits)
