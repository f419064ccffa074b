"""GPT-2: learned positions, layer norms, one fused projection of q, k and v, an MLP without a gate.

Its config.json has names of its own, its weights are stored [in, out].
"""

from typing import Final

from loraplex.core.errors import ConfigError, UnsupportedModelError
from loraplex.kernels.activations import Activation
from loraplex.models.config_fields import ConfigFields
from loraplex.models.decoder_names import DecoderNames
from loraplex.models.family_config import check_heads, pre_norm_layer, read_dtype, refuse_fields
from loraplex.models.spec import (
    DOWN,
    OUTPUT,
    QKV,
    UP,
    AttentionSpec,
    FeedForwardSpec,
    ModelSpec,
    NormKind,
    NormSpec,
)

ARCHITECTURE = "GPT2LMHeadModel"

NAMES: Final = DecoderNames(
    root="transformer.",
    embedding="wte",
    positions="wpe",
    layers="h",
    input_norm="ln_1",
    post_attention_norm="ln_2",
    final_norm="ln_f",
    qkv=("attn.c_attn",),
    o="attn.c_proj",
    up=("mlp.c_fc",),
    down="mlp.c_proj",
    # The causal mask, once more in each layer.
    buffers=r"(transformer\.)?h\.\d+\.attn\.(bias|masked_bias)",
    has_transposed_weights=True,
)

_ACTIVATIONS: Final = {
    "gelu": Activation.GELU,
    "gelu_new": Activation.GELU_TANH,
    "gelu_fast": Activation.GELU_TANH,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
    "relu": Activation.RELU,
}
"""Activations by Hugging Face's names."""

_NEEDED = {
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "reorder_and_upcast_attn": False,
    "add_cross_attention": False,
}
"""Fields whose other values are not supported."""


def read_config(fields: ConfigFields) -> ModelSpec:
    """Read a config.json. Absent fields have the values of the first GPT-2, except for sizes."""
    refuse_fields(fields)
    for name, needed in _NEEDED.items():
        if fields.boolean(name, needed) != needed:
            raise UnsupportedModelError(
                f"{fields.source}: {name} {str(not needed).lower()} is not supported"
            )
    hidden_size, num_heads = fields.integer("n_embd"), fields.integer("n_head")
    if hidden_size % num_heads:
        raise ConfigError(
            f"{fields.source}: n_embd ({hidden_size}) must be a multiple of n_head ({num_heads})"
        )
    head_dim = hidden_size // num_heads
    check_heads(fields, num_heads, num_heads, head_dim)
    attention = AttentionSpec(
        num_heads=num_heads, num_kv_heads=num_heads, head_dim=head_dim, rope=None
    )
    activation = _read_activation(fields)
    feed_forward = FeedForwardSpec(
        inner_size=fields.integer("n_inner", 4 * hidden_size),
        activation=_ACTIVATIONS[activation],
        is_gated=False,
    )
    max_positions = fields.integer("n_positions", 1024)
    norm = (NormKind.LAYER, fields.number("layer_norm_epsilon", 1e-5))
    return ModelSpec(
        architecture=ARCHITECTURE,
        hidden_size=hidden_size,
        vocab_size=fields.integer("vocab_size"),
        layers=tuple(
            pre_norm_layer(
                NAMES,
                index,
                hidden_size,
                attention,
                feed_forward,
                norm=norm,
                biased=(QKV, OUTPUT, UP, DOWN),
            )
            for index in range(fields.integer("n_layer"))
        ),
        final_norm=NormSpec(NAMES.root + NAMES.final_norm, hidden_size, norm[1], norm[0]),
        names=NAMES,
        max_position_embeddings=max_positions,
        default_max_model_len=max_positions,
        hidden_act=activation,
        has_position_table=True,
        tie_word_embeddings=fields.boolean("tie_word_embeddings", True),
        eos_token_ids=fields.integers("eos_token_id"),
        bos_token_id=fields.optional_integer("bos_token_id"),
        pad_token_id=fields.optional_integer("pad_token_id"),
        dtype=read_dtype(fields),
    )


def _read_activation(fields: ConfigFields) -> str:
    name = fields.text("activation_function", "gelu_new")
    if name not in _ACTIVATIONS:
        raise UnsupportedModelError(
            f"{fields.source}: activation_function {name!r} is not supported; "
            f"supported: {', '.join(_ACTIVATIONS)}"
        )
    return name
