"""GPT-J: parallel parts after one norm; the first elements of a head turn, in pairs."""

import dataclasses
import math
from typing import Final

from loraplex.core.errors import ConfigError
from loraplex.models.config_fields import ConfigFields
from loraplex.models.decoder_names import DecoderNames
from loraplex.models.family_config import LAYER_NORM, Traits, read_decoder
from loraplex.models.spec import DOWN, UP, ModelSpec

ARCHITECTURE: Final = "GPTJForCausalLM"

NAMES: Final = DecoderNames(
    root="transformer.",
    embedding="wte",
    layers="h",
    input_norm="ln_1",
    feed_forward_norm="",
    final_norm="ln_f",
    qkv=("attn.q_proj", "attn.k_proj", "attn.v_proj"),
    o="attn.out_proj",
    up=("mlp.fc_in",),
    down="mlp.fc_out",
    # The causal mask, once more in each layer.
    ignored=r"(transformer\.)?h\.\d+\.attn\.(bias|masked_bias)",
)

_OWN_NAMES: Final = {
    "hidden_size": "n_embd",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
    "intermediate_size": "n_inner",
    "max_position_embeddings": "n_positions",
    "hidden_act": "activation_function",
    "rms_norm_eps": "layer_norm_epsilon",
    "head_dim": "",
    "num_key_value_heads": "",
    "partial_rotary_factor": "",
    "rope_parameters": "",
    "rope_scaling": "",
    "rope_theta": "",
}
_DEFAULTS: Final = {"max_position_embeddings": 2048, "hidden_act": "gelu_new"}


def read_config(fields: ConfigFields) -> ModelSpec:
    fields = fields.renamed(_OWN_NAMES, _DEFAULTS)
    hidden_size = fields.integer("hidden_size")
    defaults = {
        "intermediate_size": 4 * hidden_size,
        "partial_rotary_factor": _partial_rotary_factor(fields, hidden_size),
    }
    traits = Traits(
        names=NAMES,
        is_rope_interleaved=True,
        biased=(UP, DOWN),
        norm=LAYER_NORM,
        is_gated=False,
        is_parallel=True,
    )
    spec = read_decoder(fields.renamed({}, defaults), ARCHITECTURE, traits)
    return dataclasses.replace(spec, has_lm_head_bias=True)


def _partial_rotary_factor(fields: ConfigFields, hidden_size: int) -> float:
    """Return the least part of a head that has rotary_dim elements."""
    head_dim = hidden_size // fields.integer("num_attention_heads")
    rotary_dim = fields.integer("rotary_dim", 64)
    if rotary_dim > head_dim or rotary_dim % 2:
        raise ConfigError(
            f"{fields.source}: rotary_dim must be even and at most the size of a head "
            f"({head_dim}), got {rotary_dim}"
        )
    return min(1.0, math.nextafter(rotary_dim / head_dim, 1.0))
