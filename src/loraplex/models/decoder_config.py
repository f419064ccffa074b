"""What the families read alike from a Hugging Face config.json."""

import dataclasses
from collections.abc import Sequence

from loraplex.core.errors import ConfigError, UnsupportedModelError
from loraplex.models.config import DecoderConfig
from loraplex.models.config_fields import ConfigFields
from loraplex.models.rope_config import read_rope

_SILU = ("silu", "swish")
_DTYPES = ("float32", "float16", "bfloat16")
_REFUSED_FIELDS = (
    ("quantization_config", "quantised checkpoints"),
    ("num_experts", "mixtures of experts"),
    ("num_local_experts", "mixtures of experts"),
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FamilyTraits:
    """In what a family differs from plain Llama; read from the same file."""

    layer_windows: tuple[int | None, ...]
    default_max_position_embeddings: int
    default_head_dim: int | None = None
    """None: hidden_size / num_attention_heads."""
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False


def read_decoder(fields: ConfigFields, architecture: str, traits: FamilyTraits) -> DecoderConfig:
    """Raises ConfigError or UnsupportedModelError, naming the field."""
    refuse_fields(fields)
    _check_activation(fields)
    num_heads = fields.integer("num_attention_heads")
    hidden_size = fields.integer("hidden_size")
    head_dim = fields.integer("head_dim", traits.default_head_dim or hidden_size // num_heads)
    num_kv_heads = fields.integer("num_key_value_heads", num_heads)
    check_heads(fields, num_heads, num_kv_heads, head_dim)
    max_positions = fields.integer(
        "max_position_embeddings", traits.default_max_position_embeddings
    )
    return DecoderConfig(
        architecture=architecture,
        hidden_size=hidden_size,
        num_layers=fields.integer("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        intermediate_size=fields.integer("intermediate_size"),
        vocab_size=fields.integer("vocab_size"),
        max_position_embeddings=max_positions,
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope=read_rope(fields, head_dim, max_positions),
        layer_windows=traits.layer_windows,
        qkv_bias=traits.qkv_bias,
        o_bias=traits.o_bias,
        mlp_bias=traits.mlp_bias,
        qk_norm=traits.qk_norm,
        tie_word_embeddings=fields.boolean("tie_word_embeddings", False),
        eos_token_ids=fields.integers("eos_token_id"),
        bos_token_id=fields.optional_integer("bos_token_id"),
        pad_token_id=fields.optional_integer("pad_token_id"),
        dtype=read_dtype(fields),
    )


def windows_by_layer_type(fields: ConfigFields) -> tuple[int | None, ...]:
    """Qwen's rule: `use_sliding_window` switches it on; `layer_types`, or else
    `max_window_layers`, says from which layer on.
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
    """Raises UnsupportedModelError for what no family here has."""
    for name, what in _REFUSED_FIELDS:
        if name in fields:
            raise UnsupportedModelError(f"{fields.source} has {name}: {what} are not supported")


def _check_activation(fields: ConfigFields) -> None:
    activation = fields.text("hidden_act", "silu")
    if activation not in _SILU:
        raise UnsupportedModelError(
            f"{fields.source}: hidden_act {activation!r} is not supported; supported: silu"
        )


def check_heads(fields: ConfigFields, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    """Raises ConfigError."""
    if num_heads % num_kv_heads:
        raise ConfigError(
            f"{fields.source}: num_attention_heads ({num_heads}) must be a multiple of "
            f"num_key_value_heads ({num_kv_heads})"
        )
    if head_dim % 2 or head_dim < 4:
        raise ConfigError(f"{fields.source}: head_dim must be even and at least 4, got {head_dim}")


def read_dtype(fields: ConfigFields) -> str | None:
    """`dtype` (transformers 5) or `torch_dtype`. Raises UnsupportedModelError."""
    name = fields.text("dtype", fields.text("torch_dtype", ""))
    if name and name not in _DTYPES:
        raise UnsupportedModelError(
            f"{fields.source}: dtype {name!r} is not supported; supported: {', '.join(_DTYPES)}"
        )
    return name or None
