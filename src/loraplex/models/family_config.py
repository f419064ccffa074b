"""Readers of the fields of a Hugging Face config.json that several families share."""

import dataclasses
from collections.abc import Sequence

from loraplex.core.errors import ConfigError, UnsupportedModelError
from loraplex.kernels.activations import Activation
from loraplex.models.config_fields import ConfigFields
from loraplex.models.decoder_names import LLAMA_NAMES, DecoderNames
from loraplex.models.rope_config import max_rotary_len, read_rope
from loraplex.models.spec import (
    DOWN,
    OUTPUT,
    QKV,
    UP,
    AttentionSpec,
    FeedForwardSpec,
    LayerSpec,
    LinearGroup,
    ModelSpec,
    NormKind,
    NormPlace,
    NormSpec,
)

_SILU = ("silu", "swish")
_DTYPES = ("float32", "float16", "bfloat16")
_REFUSED_FIELDS = (
    ("quantization_config", "quantised checkpoints"),
    ("num_experts", "mixtures of experts"),
    ("num_local_experts", "mixtures of experts"),
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LlamaTraits:
    """Differences between a family and plain Llama, read from the same file."""

    layer_windows: tuple[int | None, ...]
    default_max_position_embeddings: int
    default_head_dim: int | None = None
    """None: hidden_size / num_attention_heads."""
    biased: tuple[str, ...] = ()
    """Groups of linear layers that have a bias: QKV, OUTPUT, UP, DOWN."""
    has_head_norms: bool = False


def read_llama_like(fields: ConfigFields, architecture: str, traits: LlamaTraits) -> ModelSpec:
    """Read a model of Llama's form. Raises ConfigError or UnsupportedModelError."""
    refuse_fields(fields)
    hidden_act = _read_activation(fields)
    num_heads = fields.integer("num_attention_heads")
    hidden_size = fields.integer("hidden_size")
    head_dim = fields.integer("head_dim", traits.default_head_dim or hidden_size // num_heads)
    num_kv_heads = fields.integer("num_key_value_heads", num_heads)
    check_heads(fields, num_heads, num_kv_heads, head_dim)
    max_positions = fields.integer(
        "max_position_embeddings", traits.default_max_position_embeddings
    )
    rope = read_rope(fields, head_dim, max_positions)
    inner_size, eps = fields.integer("intermediate_size"), fields.number("rms_norm_eps", 1e-6)

    def layer(index: int, window: int | None) -> LayerSpec:
        q_norm, k_norm = (
            NormSpec(LLAMA_NAMES.layer(index) + name, head_dim, eps)
            if traits.has_head_norms
            else None
            for name in (LLAMA_NAMES.q_norm, LLAMA_NAMES.k_norm)
        )
        return pre_norm_layer(
            LLAMA_NAMES,
            index,
            hidden_size,
            AttentionSpec(
                num_heads=num_heads,
                num_kv_heads=num_kv_heads,
                head_dim=head_dim,
                rope=rope,
                window=window,
                q_norm=q_norm,
                k_norm=k_norm,
            ),
            FeedForwardSpec(inner_size=inner_size, activation=Activation.SILU, is_gated=True),
            norm=(NormKind.RMS, eps),
            biased=traits.biased,
        )

    return ModelSpec(
        architecture=architecture,
        hidden_size=hidden_size,
        vocab_size=fields.integer("vocab_size"),
        layers=tuple(layer(index, window) for index, window in enumerate(traits.layer_windows)),
        final_norm=NormSpec(LLAMA_NAMES.root + LLAMA_NAMES.final_norm, hidden_size, eps),
        names=LLAMA_NAMES,
        max_position_embeddings=max_positions,
        default_max_model_len=max_rotary_len(rope, max_positions),
        hidden_act=hidden_act,
        tie_word_embeddings=fields.boolean("tie_word_embeddings", False),
        eos_token_ids=fields.integers("eos_token_id"),
        bos_token_id=fields.optional_integer("bos_token_id"),
        pad_token_id=fields.optional_integer("pad_token_id"),
        dtype=read_dtype(fields),
    )


def pre_norm_layer(
    names: DecoderNames,
    index: int,
    hidden_size: int,
    attention: AttentionSpec,
    feed_forward: FeedForwardSpec,
    *,
    norm: tuple[NormKind, float],
    biased: Sequence[str],
) -> LayerSpec:
    """Build a layer with one norm before attention and one before the feed-forward part.

    norm: kind and epsilon of both. biased: names of the groups of linear layers with a bias.
    """
    prefix = names.layer(index)
    qkv_sizes: tuple[int, ...] = (attention.q_size, attention.kv_size, attention.kv_size)
    if len(names.qkv) == 1:
        qkv_sizes = (sum(qkv_sizes),)
    inner_sizes = (feed_forward.inner_size,) * len(names.up)

    def group(
        name: str, paths: tuple[str, ...], sizes: tuple[int, ...], in_features: int
    ) -> LinearGroup:
        return LinearGroup(
            paths=tuple(prefix + path for path in paths),
            outputs=dict(zip(map(names.module, paths), sizes, strict=True)),
            in_features=in_features,
            has_bias=name in biased,
        )

    def norm_at(name: str) -> NormSpec:
        kind, eps = norm
        return NormSpec(prefix + name, hidden_size, eps, kind)

    return LayerSpec(
        attention=attention,
        feed_forward=feed_forward,
        norms={
            NormPlace.BEFORE_ATTENTION: norm_at(names.input_norm),
            NormPlace.BEFORE_FEED_FORWARD: norm_at(names.post_attention_norm),
        },
        linears={
            QKV: group(QKV, names.qkv, qkv_sizes, hidden_size),
            OUTPUT: group(OUTPUT, (names.o,), (hidden_size,), attention.q_size),
            UP: group(UP, names.up, inner_sizes, hidden_size),
            DOWN: group(DOWN, (names.down,), (hidden_size,), feed_forward.inner_size),
        },
    )


def windows_by_layer_type(fields: ConfigFields) -> tuple[int | None, ...]:
    """Read the window of each layer by Qwen's rule.

    `use_sliding_window` switches windows on; `layer_types`, or else `max_window_layers`, selects
    the layers.
    """
    num_layers = fields.integer("num_hidden_layers")
    window = fields.optional_integer("sliding_window")
    if not fields.boolean("use_sliding_window", False):
        window = None
    first_windowed = fields.integer("max_window_layers", 28) if window is not None else num_layers
    layer_types = fields.texts("layer_types") or _layer_types(num_layers, first_windowed)
    _check_layer_types(fields, layer_types, num_layers)
    return tuple(window if kind == "sliding_attention" else None for kind in layer_types)


def _layer_types(num_layers: int, first_windowed: int) -> tuple[str, ...]:
    return tuple(
        "sliding_attention" if layer >= first_windowed else "full_attention"
        for layer in range(num_layers)
    )


def _check_layer_types(fields: ConfigFields, layer_types: Sequence[str], num_layers: int) -> None:
    if len(layer_types) != num_layers:
        raise ConfigError(
            f"{fields.source}: layer_types has {len(layer_types)} entries, "
            f"num_hidden_layers is {num_layers}"
        )
    for kind in layer_types:
        if kind not in ("full_attention", "sliding_attention"):
            raise UnsupportedModelError(
                f"{fields.source}: layer type {kind!r} is not supported; "
                "supported: full_attention, sliding_attention"
            )


def refuse_fields(fields: ConfigFields) -> None:
    """Raise UnsupportedModelError for fields that no family supports."""
    for name, what in _REFUSED_FIELDS:
        if name in fields:
            raise UnsupportedModelError(f"{fields.source} has {name}: {what} are not supported")


def _read_activation(fields: ConfigFields) -> str:
    activation = fields.text("hidden_act", "silu")
    if activation not in _SILU:
        raise UnsupportedModelError(
            f"{fields.source}: hidden_act {activation!r} is not supported; supported: silu"
        )
    return activation


def check_heads(fields: ConfigFields, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    """Raise ConfigError if the heads cannot be grouped or rotated in pairs."""
    if num_heads % num_kv_heads:
        raise ConfigError(
            f"{fields.source}: num_attention_heads ({num_heads}) must be a multiple of "
            f"num_key_value_heads ({num_kv_heads})"
        )
    if head_dim % 2 or head_dim < 4:
        raise ConfigError(f"{fields.source}: head_dim must be even and at least 4, got {head_dim}")


def read_dtype(fields: ConfigFields) -> str | None:
    """Read `dtype` (transformers 5) or `torch_dtype`. Raises UnsupportedModelError."""
    name = fields.text("dtype", fields.text("torch_dtype", ""))
    if name and name not in _DTYPES:
        raise UnsupportedModelError(
            f"{fields.source}: dtype {name!r} is not supported; supported: {', '.join(_DTYPES)}"
        )
    return name or None
