"""T5, Flan-T5, ByT5, mT5, umT5: an encoder and a decoder whose scores have a bias by distance."""

import dataclasses
from typing import Final

from loraplex.core.errors import ConfigError, UnsupportedModelError
from loraplex.kernels.activations import Activation
from loraplex.models.config_fields import ConfigFields
from loraplex.models.decoder_names import DecoderNames
from loraplex.models.encoder_decoder_config import (
    ENCODER,
    Stack,
    StackNames,
    read_first_ids,
)
from loraplex.models.family_config import RMS_NORM, read_dtype
from loraplex.models.spec import EncoderSpec, FeedForwardSpec, LayerSpec, ModelSpec
from loraplex.models.specs.attention import AttentionSpec, PositionBias
from loraplex.models.specs.cross import CrossSpec

ARCHITECTURE: Final = "T5ForConditionalGeneration"
ARCHITECTURE_MT5: Final = "MT5ForConditionalGeneration"
ARCHITECTURE_UMT5: Final = "UMT5ForConditionalGeneration"

LONGEST: Final = 4096
"""Maximum length of inputs and of outputs. The model knows none: its biases stay the same from
relative_attention_max_distance on."""

_MIN_BUCKETS: Final = 4
"""An encoder halves them twice: by direction, and into exact and growing ones."""
_MAX_DISTANCE: Final = 1 << 16
"""The table has a number for each distance."""

NAMES: Final = DecoderNames(
    root="decoder.",
    layers="block",
    final_norm="final_layer_norm",
    other_names={"shared": "embed_tokens"},
    # Copies of the embedding, and a table of cross attention that no version reads.
    ignored=r"(encoder|decoder)\.embed_tokens\.weight"
    r"|.*\.EncDecAttention\.relative_attention_bias\.weight",
)
_ACTIVATIONS: Final = {
    "relu": Activation.RELU,
    "gelu": Activation.GELU_TANH,
    "silu": Activation.SILU,
}


def read_config(fields: ConfigFields) -> ModelSpec:
    """Read T5. Older files have scaled logits unless tie_word_embeddings is false."""
    is_tied = fields.boolean("tie_word_embeddings", True)
    return _read(fields, ARCHITECTURE, is_scaled=fields.boolean("scale_decoder_outputs", is_tied))


def read_config_mt5(fields: ConfigFields) -> ModelSpec:
    return _read(fields, ARCHITECTURE_MT5, is_scaled=False)


def read_config_umt5(fields: ConfigFields) -> ModelSpec:
    """Read umT5, which has a table of biases in every layer, and always scales the logits."""
    return _read(fields, ARCHITECTURE_UMT5, is_scaled=True, has_own_biases=True)


def _read(
    fields: ConfigFields, architecture: str, *, is_scaled: bool, has_own_biases: bool = False
) -> ModelSpec:
    hidden = fields.integer("d_model", 512)
    num_layers = fields.integer("num_layers", 6)
    num_heads, head_dim = fields.integer("num_heads", 8), fields.integer("d_kv", 64)
    norm = dataclasses.replace(
        RMS_NORM, size=hidden, eps=fields.number("layer_norm_epsilon", RMS_NORM.eps)
    )
    feed_forward = _feed_forward(fields, architecture)
    attention = AttentionSpec(
        num_heads=num_heads, num_kv_heads=num_heads, head_dim=head_dim, rope=None, scale=1.0
    )
    encoder = Stack(
        names=_names(1, is_gated=feed_forward.is_gated),
        attention=dataclasses.replace(attention, is_causal=False),
        feed_forward=feed_forward,
        norm=norm,
        has_biases=False,
        module_prefix=ENCODER,
    )
    decoder = dataclasses.replace(
        encoder,
        names=_names(2, is_gated=feed_forward.is_gated),
        attention=attention,
        cross=CrossSpec(num_heads=num_heads, head_dim=head_dim, scale=1.0),
        module_prefix="",
    )
    buckets = fields.integer("relative_attention_num_buckets", 32)
    distance = fields.integer("relative_attention_max_distance", 128)
    if buckets < _MIN_BUCKETS or not buckets // 2 < distance <= _MAX_DISTANCE:
        raise ConfigError(
            f"{fields.source}: relative_attention_num_buckets must be at least {_MIN_BUCKETS}, and "
            f"relative_attention_max_distance more than half of it and at most {_MAX_DISTANCE}, "
            f"got {buckets} and {distance}"
        )

    def layers(stack: Stack, name: str, count: int) -> tuple[LayerSpec, ...]:
        made = []
        for index in range(count):
            owner = index if has_own_biases else 0
            table = f"{name}.block.{owner}.layer.0.SelfAttention.relative_attention_bias.weight"
            bias = PositionBias(table, buckets, distance)
            own = dataclasses.replace(stack.attention, position_bias=bias)
            made.append(stack.layer(f"{name}.block.{index}.", own))
        return tuple(made)

    start = fields.optional_integer("pad_token_id")
    vocab_size = fields.integer("vocab_size", 32128)
    return ModelSpec(
        architecture=architecture,
        hidden_size=hidden,
        vocab_size=vocab_size,
        layers=layers(decoder, "decoder", fields.integer("num_decoder_layers", num_layers)),
        final_norm=dataclasses.replace(norm, path="decoder.final_layer_norm"),
        names=NAMES,
        max_position_embeddings=LONGEST,
        default_max_model_len=LONGEST,
        hidden_act=fields.text("feed_forward_proj", "relu"),
        logits_factor=hidden**-0.5 if is_scaled else 1.0,
        # A file without lm_head.weight has the embedding; execution.weights finds another one.
        tie_word_embeddings=True,
        eos_token_ids=fields.integers("eos_token_id") or (1,),
        bos_token_id=fields.optional_integer("bos_token_id"),
        pad_token_id=0 if start is None else start,
        dtype=read_dtype(fields),
        exceeds_float16=True,
        encoder=EncoderSpec(
            longest_input=LONGEST,
            layers=layers(encoder, "encoder", num_layers),
            final_norm=dataclasses.replace(norm, path="encoder.final_layer_norm"),
            layer_prefix="encoder.block.{}.",
            first_ids=read_first_ids(fields, vocab_size, 0 if start is None else start),
        ),
    )


def _feed_forward(fields: ConfigFields, architecture: str) -> FeedForwardSpec:
    default = "relu" if architecture == ARCHITECTURE else "gated-gelu"
    form = fields.text("feed_forward_proj", default)
    name = form.removeprefix("gated-")
    if name not in _ACTIVATIONS or (name == "gelu" and name == form):
        raise UnsupportedModelError(
            f"{fields.source}: feed_forward_proj {form!r} is not supported; supported: relu, silu, "
            "gated-gelu, gated-silu, gated-relu"
        )
    return FeedForwardSpec(
        inner_size=fields.integer("d_ff", 2048),
        activation=_ACTIVATIONS[name],
        is_gated=name != form,
    )


def _names(feed_forward: int, *, is_gated: bool) -> StackNames:
    """feed_forward: number of the part in a layer."""
    inner = f"layer.{feed_forward}.DenseReluDense."
    return StackNames(
        attention="layer.0.SelfAttention",
        attention_norm="layer.0.layer_norm",
        cross="layer.1.EncDecAttention",
        cross_norm="layer.1.layer_norm",
        projections=("q", "k", "v", "o"),
        output_module="o_proj",
        up=(f"{inner}wi_0", f"{inner}wi_1") if is_gated else (f"{inner}wi",),
        down=f"{inner}wo",
        up_modules=("gate_proj", "up_proj") if is_gated else ("fc1",),
        down_module="down_proj",
        feed_forward_norm=f"layer.{feed_forward}.layer_norm",
    )
