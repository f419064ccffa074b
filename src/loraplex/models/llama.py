"""Llama 1 to 3 and what shares their form: biases are optional, every layer sees all before it."""

from loraplex.models.config import DecoderConfig
from loraplex.models.config_fields import ConfigFields
from loraplex.models.decoder_config import FamilyTraits, read_decoder

ARCHITECTURE = "LlamaForCausalLM"


def read_config(fields: ConfigFields) -> DecoderConfig:
    """`attention_bias` means the output projection, too."""
    attention_bias = fields.boolean("attention_bias", False)
    traits = FamilyTraits(
        layer_windows=(None,) * fields.integer("num_hidden_layers"),
        default_max_position_embeddings=2048,
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        mlp_bias=fields.boolean("mlp_bias", False),
    )
    return read_decoder(fields, ARCHITECTURE, traits)
