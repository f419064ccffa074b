"""InternLM 2 and 3: the fused projection of InternLM 2 groups queries by their key head."""

from typing import Final

from loraplex.models.config_fields import ConfigFields
from loraplex.models.decoder_names import DecoderNames
from loraplex.models.family_config import Traits, heads_in_groups, read_decoder
from loraplex.models.spec import DOWN, UP, ModelSpec
from loraplex.models.specs.attention import OUTPUT, QKV

ARCHITECTURE_2: Final = "InternLM2ForCausalLM"
ARCHITECTURE_3: Final = "InternLM3ForCausalLM"

NAMES_2: Final = DecoderNames(
    embedding="tok_embeddings",
    input_norm="attention_norm",
    feed_forward_norm="ffn_norm",
    qkv=("attention.wqkv",),
    o="attention.wo",
    up=("feed_forward.w1", "feed_forward.w3"),
    down="feed_forward.w2",
    lm_head="output",
    other_names={"lm_head": "output"},
)

_DEFAULTS: Final = {"max_position_embeddings": 2048}
_DEFAULTS_3: Final = {"max_position_embeddings": 32_768}


def read_config_2(fields: ConfigFields) -> ModelSpec:
    fields = fields.renamed({"head_dim": ""}, _DEFAULTS)
    num_heads = fields.integer("num_attention_heads")
    num_kv_heads = fields.integer("num_key_value_heads", num_heads)
    traits = Traits(
        names=NAMES_2,
        biased=(QKV, OUTPUT) if fields.boolean("bias", True) else (),
        head_order=heads_in_groups(num_heads, num_kv_heads),
    )
    return read_decoder(fields, ARCHITECTURE_2, traits)


def read_config_3(fields: ConfigFields) -> ModelSpec:
    """Read a config.json: `bias` is of all linear layers but q, k and v."""
    fields = fields.renamed({}, _DEFAULTS_3)
    biased: tuple[str, ...] = (OUTPUT, UP, DOWN) if fields.boolean("bias", False) else ()
    if fields.boolean("qkv_bias", False):
        biased += (QKV,)
    return read_decoder(fields, ARCHITECTURE_3, Traits(biased=biased))
