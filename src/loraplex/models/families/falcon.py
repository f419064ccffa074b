"""Falcon: multi-query attention (7B), grouped heads and two norms (40B), or ALiBi (RW)."""

import struct
from typing import Final

from loraplex.core.errors import UnsupportedModelError
from loraplex.models.config_fields import ConfigFields
from loraplex.models.decoder_names import DecoderNames
from loraplex.models.family_config import (
    ALL_BIASED,
    LAYER_NORM,
    Traits,
    alibi_slopes,
    heads_in_groups,
    read_decoder,
)
from loraplex.models.spec import ModelSpec

ARCHITECTURE: Final = "FalconForCausalLM"

_FIRST_NAMES: Final = {
    "hidden_size": "n_embed",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "num_kv_heads": "n_head_kv",
}
"""Names in the first files."""
_OWN_NAMES: Final = {
    "head_dim": "",
    "intermediate_size": "ffn_hidden_size",
    "num_key_value_heads": "",
    "hidden_act": "activation",
    "rms_norm_eps": "layer_norm_epsilon",
}


def read_config(fields: ConfigFields) -> ModelSpec:
    first_names = {name: own for name, own in _FIRST_NAMES.items() if own in fields}
    fields = fields.renamed(first_names, {})
    num_heads, num_kv_heads = _num_heads(fields)
    defaults = {
        "hidden_act": "gelu",
        "intermediate_size": 4 * fields.integer("hidden_size"),
        "max_position_embeddings": 2048,
        "num_key_value_heads": num_kv_heads,
        "tie_word_embeddings": True,
    }
    fields = fields.renamed(_OWN_NAMES, defaults)
    has_alibi = fields.boolean("alibi", False)
    is_new = fields.boolean("new_decoder_architecture", False)
    is_parallel = is_new or fields.boolean("parallel_attn", True)
    traits = Traits(
        names=_names(fields, is_new=is_new, is_parallel=is_parallel),
        rotates=(not has_alibi,),
        alibi_slopes=_slopes(fields, num_heads) if has_alibi else (),
        biased=ALL_BIASED if fields.boolean("bias", False) else (),
        norm=LAYER_NORM,
        head_order=heads_in_groups(num_heads, num_kv_heads),
        is_gated=False,
        is_parallel=is_parallel,
        rotates_whole_heads=True,
    )
    return read_decoder(fields, ARCHITECTURE, traits)


def _num_heads(fields: ConfigFields) -> tuple[int, int]:
    """Return the numbers of heads and key heads.

    num_kv_heads may be wrong in the file of a model with one key head.
    """
    num_heads = fields.integer("num_attention_heads")
    if fields.boolean("new_decoder_architecture", False):
        return num_heads, fields.integer("num_kv_heads", num_heads)
    return num_heads, 1 if fields.boolean("multi_query", True) else num_heads


def _names(fields: ConfigFields, *, is_new: bool, is_parallel: bool) -> DecoderNames:
    num_norms = fields.integer("num_ln_in_parallel_attn", 2 if is_new else 1)
    if num_norms > 1 + is_new:
        raise UnsupportedModelError(
            f"{fields.source}: num_ln_in_parallel_attn {num_norms} is not supported"
        )
    input_norm, feed_forward_norm = "input_layernorm", "post_attention_layernorm"
    if num_norms == 2:
        input_norm, feed_forward_norm = "ln_attn", "ln_mlp"
    elif is_parallel:
        feed_forward_norm = ""
    return DecoderNames(
        root="transformer.",
        embedding="word_embeddings",
        layers="h",
        input_norm=input_norm,
        feed_forward_norm=feed_forward_norm,
        final_norm="ln_f",
        qkv=("self_attention.query_key_value",),
        o="self_attention.dense",
        up=("mlp.dense_h_to_4h",),
        down="mlp.dense_4h_to_h",
    )


def _slopes(fields: ConfigFields, num_heads: int) -> tuple[float, ...]:
    """Return the slopes, which Falcon rounds to bfloat16 and scales like the scores."""
    scale = (fields.integer("hidden_size") // num_heads) ** -0.5
    return tuple(scale * _bfloat16(slope) for slope in alibi_slopes(num_heads))


def _bfloat16(value: float) -> float:
    """Round to the nearest bfloat16, ties to even."""
    (bits,) = struct.unpack("<I", struct.pack("<f", value))
    bits += 0x7FFF + (bits >> 16 & 1)
    (rounded,) = struct.unpack("<f", struct.pack("<I", bits & 0xFFFF0000))
    return float(rounded)
