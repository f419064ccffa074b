"""T5, Flan-T5, ByT5, mT5, umT5: an encoder and a decoder whose scores have a bias by distance."""

import dataclasses
from typing import Final

from loraplex.core.errors import ConfigError, UnsupportedModelError
from loraplex.kernels.activations import Activation
from loraplex.models.config_fields import ConfigFields
from loraplex.models.decoder_names import DecoderNames
from loraplex.models.encoder_decoder_config import (
    Stack,
    StackNames,
    read_first_ids,
)
from loraplex.models.family_config import RMS_NORM, read_dtype
from loraplex.models.spec import EncoderSpec, FeedForwardSpec, LayerSpec, ModelSpec
from loraplex.models.specs.attention import AttentionSpec, PositionBias
from loraplex.models.specs.part import NormSpec

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
    eps = fields.number("layer_norm_epsilon", RMS_NORM.eps)
    norm = dataclasses.replace(RMS_NORM, size=hidden, eps=eps)
    num_layers = fields.integer("num_layers", 6)
    counts = {
        "encoder": num_layers,
        "decoder": fields.integer("num_decoder_layers", num_layers),
    }
    feed_forward = _feed_forward(fields, architecture)
    layers: dict[str, tuple[LayerSpec, ...]] = {}
    for name, count in counts.items():
        stack = _stack(fields, name, norm, feed_forward)
        owners = range(count) if has_own_biases else [0] * count
        layers[name] = tuple(
            stack.layer(f"{name}.block.{index}.", _biased(fields, stack.attention, name, owner))
            for index, owner in enumerate(owners)
        )
    pad = fields.optional_integer("pad_token_id") or 0
    vocab_size = fields.integer("vocab_size", 32128)
    return ModelSpec(
        architecture=architecture,
        hidden_size=hidden,
        vocab_size=vocab_size,
        layers=layers["decoder"],
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
        pad_token_id=pad,
        dtype=read_dtype(fields),
        exceeds_float16=True,
        encoder=EncoderSpec(
            longest_input=LONGEST,
            layers=layers["encoder"],
            final_norm=dataclasses.replace(norm, path="encoder.final_layer_norm"),
            layer_prefix="encoder.block.{}.",
            first_ids=read_first_ids(fields, vocab_size, pad),
        ),
    )


def _stack(fields: ConfigFields, name: str, norm: NormSpec, feed_forward: FeedForwardSpec) -> Stack:
    num_heads, is_causal = fields.integer("num_heads", 8), name == "decoder"
    return Stack(
        names=_names(1 + is_causal, is_gated=feed_forward.is_gated),
        attention=AttentionSpec(
            num_heads=num_heads,
            num_kv_heads=num_heads,
            head_dim=fields.integer("d_kv", 64),
            rope=None,
            scale=1.0,
            is_causal=is_causal,
        ),
        feed_forward=feed_forward,
        norm=norm,
        has_biases=False,
    )


def _biased(
    fields: ConfigFields, attention: AttentionSpec, stack: str, owner: int
) -> AttentionSpec:
    """Return attention with the biases of the layer `owner` of a stack."""
    buckets = fields.integer("relative_attention_num_buckets", 32)
    distance = fields.integer("relative_attention_max_distance", 128)
    if buckets < _MIN_BUCKETS or not buckets // 2 < distance <= _MAX_DISTANCE:
        raise ConfigError(
            f"{fields.source}: relative_attention_num_buckets must be at least {_MIN_BUCKETS}, and "
            f"relative_attention_max_distance more than half of it and at most {_MAX_DISTANCE}, "
            f"got {buckets} and {distance}"
        )
    table = f"{stack}.block.{owner}.layer.0.SelfAttention.relative_attention_bias.weight"
    bias = PositionBias(table, buckets, distance)
    return dataclasses.replace(attention, position_bias=bias)


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
