"""Reads a Hugging Face config.json into a ModelSpec, as far as the families agree.

A family renames its fields to Llama's, sets their defaults (`ConfigFields.renamed`), and states as
`Traits` how its layers differ from plain Llama's.

Also windows and rotary embeddings of two types of layers, sliding and full attention: `layer_types`
names the type of each layer; older files state a period, of which the last layer has full
attention. And the language model within a multimodal wrapper.
"""

import dataclasses
import functools
import itertools
import json
import operator
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Final

from loraplex.core.errors import ConfigError, UnsupportedModelError
from loraplex.kernels.activations import Activation
from loraplex.models.config_fields import ConfigFields
from loraplex.models.decoder_names import LLAMA_NAMES, DecoderNames
from loraplex.models.expert_config import ExpertTraits, equal_parts, expert_groups, with_experts
from loraplex.models.linear_group import LinearGroup
from loraplex.models.rope_config import (
    FULL_ATTENTION,
    LAYER_TYPES,
    SLIDING_ATTENTION,
    max_rotary_len,
    read_layer_ropes,
    read_rope,
)
from loraplex.models.spec import (
    DOWN,
    SHARED_DOWN,
    UP,
    FeedForwardSpec,
    LayerSpec,
    ModelSpec,
    NormPlace,
)
from loraplex.models.specs.attention import OUTPUT, QKV, AttentionSpec
from loraplex.models.specs.part import NormKind, NormSpec, RopeConfig

_ACTIVATIONS: Final[Mapping[str, Activation]] = MappingProxyType(
    {
        "silu": Activation.SILU,
        "swish": Activation.SILU,
        "gelu": Activation.GELU,
        "gelu_new": Activation.GELU_TANH,
        "gelu_fast": Activation.GELU_TANH,
        "gelu_pytorch_tanh": Activation.GELU_TANH,
        "relu": Activation.RELU,
        "relu2": Activation.SQUARED_RELU,
    }
)
"""Activations by Hugging Face's names."""
_DTYPES = ("float32", "float16", "bfloat16")
_EXPERT_FIELDS: Final = ("num_experts", "num_local_experts")
_ROW_GROUPS: Final = (OUTPUT, DOWN, SHARED_DOWN)
"""Groups whose inputs are what the ranks' own heads and inner units gave (LinearGroup.is_row)."""
QKV_PARTS: Final = ("q_proj", "k_proj", "v_proj")
UP_PARTS: Final = ("gate_proj", "up_proj")
"""Names of LinearGroup.parts: the gate, if there is one, is first."""
RMS_NORM: Final = NormSpec("", 0, 1e-6)
"""Llama's norm, without a place. Its epsilon counts where config.json has none."""
LAYER_NORM: Final = NormSpec("", 0, 1e-5, NormKind.LAYER, has_bias=True)
"""Layer norm as most families have it."""
ALL_BIASED: Final = (QKV, OUTPUT, UP, DOWN)
"""Traits.biased of a family with a bias in every linear layer."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """Differences between a family and plain Llama."""

    names: DecoderNames = LLAMA_NAMES
    windows: tuple[int | None, ...] = (None,)
    """AttentionSpec.window of each layer, repeated for further layers."""
    ropes: tuple[RopeConfig | None, ...] | None = None
    """AttentionSpec.rope of each layer, repeated for further layers; None: what read_rope reads."""
    rotates: tuple[bool, ...] = (True,)
    """Whether what read_rope reads is for the layer, repeated for further layers."""
    rotates_whole_heads: bool = False
    """Whether the family's class in transformers does not read partial_rotary_factor."""
    is_rope_interleaved: bool = False
    """RopeConfig.is_interleaved"""
    head_dim: int | None = None
    """Size of a head where config.json has none; None: hidden_size / num_attention_heads."""
    biased: tuple[str, ...] = ()
    """Groups of linear layers that have a bias: QKV, OUTPUT, UP, DOWN."""
    norm: NormSpec = RMS_NORM
    """Kind of all norms; path, size and eps are replaced."""
    head_norm: NormSpec | None = None
    """Kind of the norms of query and key heads; None: none."""
    normalizes_heads_together: bool = False
    """Whether these norms are of all heads at once."""
    normalizes_after_rotation: bool = False
    """AttentionSpec.normalizes_after_rotation"""
    has_output_gate: bool = False
    """AttentionSpec.output_gate"""
    is_causal: bool = True
    """AttentionSpec.is_causal"""
    has_weights_per_head: bool = False
    """Whether each head has weights of its own in these norms."""
    head_order: tuple[int, ...] = ()
    """AttentionSpec.head_order"""
    alibi_slopes: tuple[float, ...] = ()
    """AttentionSpec.alibi_slopes"""
    score_scale: float | None = None
    """AttentionSpec.scale"""
    score_soft_cap: float | None = None
    """AttentionSpec.soft_cap"""
    activation: Activation | None = None
    """None: hidden_act of the file."""
    is_gated: bool = True
    is_parallel: bool = False
    residual_factor: float = 1.0
    experts: ExpertTraits | None = None
    """None: all layers are dense."""


def read_decoder(fields: ConfigFields, architecture: str, traits: Traits) -> ModelSpec:
    """Read a model's configuration. Raises ConfigError or UnsupportedModelError."""
    refuse_fields(fields, has_experts=traits.experts is not None)
    names = traits.names
    hidden_size = fields.integer("hidden_size")
    attention = _read_attention(fields, traits, hidden_size)
    max_positions = fields.integer("max_position_embeddings")
    ropes = traits.ropes or _read_ropes(fields, traits, attention.head_dim, max_positions)
    feed_forward = FeedForwardSpec(
        inner_size=fields.integer("intermediate_size"),
        activation=traits.activation or read_activation(fields),
        is_gated=traits.is_gated,
    )
    norm = dataclasses.replace(traits.norm, eps=fields.number("rms_norm_eps", traits.norm.eps))
    layers = tuple(
        build_layer(
            dataclasses.replace(traits, norm=norm),
            index,
            hidden_size,
            dataclasses.replace(attention, window=window, rope=rope),
            feed_forward,
        )
        for index, window, rope in zip(
            range(fields.num_layers),
            itertools.cycle(traits.windows),
            itertools.cycle(ropes),
            strict=False,
        )
    )
    return ModelSpec(
        architecture=architecture,
        hidden_size=hidden_size,
        vocab_size=fields.integer("vocab_size"),
        layers=layers,
        embedding_norm=_norm_at(norm, names.root, names.embedding_norm, hidden_size),
        final_norm=dataclasses.replace(norm, path=names.root + names.final_norm, size=hidden_size),
        names=names,
        max_position_embeddings=max_positions,
        default_max_model_len=max(max_rotary_len(rope, max_positions) for rope in ropes),
        hidden_act=fields.text("hidden_act", "silu"),
        has_position_table=bool(names.positions),
        tie_word_embeddings=fields.boolean("tie_word_embeddings", False),
        eos_token_ids=fields.integers("eos_token_id"),
        bos_token_id=fields.optional_integer("bos_token_id"),
        pad_token_id=fields.optional_integer("pad_token_id"),
        dtype=read_dtype(fields),
    )


def _read_attention(fields: ConfigFields, traits: Traits, hidden_size: int) -> AttentionSpec:
    """Read what all layers share."""
    num_heads = fields.integer("num_attention_heads")
    num_kv_heads = fields.integer("num_key_value_heads", num_heads)
    if traits.head_dim is None and "head_dim" not in fields and hidden_size % num_heads:
        raise ConfigError(
            f"{fields.source}: {fields.own_name('hidden_size')} ({hidden_size}) must be a multiple "
            f"of {fields.own_name('num_attention_heads')} ({num_heads})"
        )
    head_dim = fields.integer("head_dim", traits.head_dim or hidden_size // num_heads)
    check_heads(fields, num_heads, num_kv_heads, head_dim)
    return AttentionSpec(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rope=None,
        scale=traits.score_scale,
        soft_cap=traits.score_soft_cap,
        alibi_slopes=traits.alibi_slopes,
        head_order=traits.head_order,
        output_gate=traits.has_output_gate,
        normalizes_after_rotation=traits.normalizes_after_rotation,
        is_causal=traits.is_causal,
    )


def _read_ropes(
    fields: ConfigFields, traits: Traits, head_dim: int, max_positions: int
) -> tuple[RopeConfig | None, ...]:
    rope = read_rope(fields, head_dim, max_positions)
    if traits.rotates_whole_heads:
        rope = _of_whole_heads(rope, fields)
    rope = dataclasses.replace(rope, is_interleaved=traits.is_rope_interleaved)
    return tuple(rope if rotates else None for rotates in traits.rotates)


def _of_whole_heads(rope: RopeConfig, fields: ConfigFields) -> RopeConfig:
    """Return the embedding without the factor, which only some rope types of transformers read."""
    if rope.rope_type == "proportional":
        return rope
    if rope.rope_type != "default" and rope.partial_rotary_factor != 1:
        raise UnsupportedModelError(
            f"{fields.source}: partial_rotary_factor with rope type {rope.rope_type!r} is not "
            "supported in this architecture"
        )
    return dataclasses.replace(rope, partial_rotary_factor=1.0)


def build_layer(
    traits: Traits,
    index: int,
    hidden_size: int,
    attention: AttentionSpec,
    feed_forward: FeedForwardSpec,
) -> LayerSpec:
    """Build one layer. traits.norm has its epsilon; windows, ropes and activation are not read.

    feed_forward: of a dense layer.
    """
    names = traits.names
    prefix = names.layer(index)
    sizes = (attention.q_outputs, *[attention.kv_size] * attention.num_kv_projections)
    qkv_sizes = (sum(sizes),) if len(names.qkv) == 1 else sizes
    heads = {} if attention.head_order else dict(zip(QKV_PARTS, sizes, strict=False))
    group = functools.partial(_linear_group, traits, prefix)
    if traits.experts is None or index in traits.experts.dense_layers:
        inner_size = feed_forward.inner_size
        up_parts = dict.fromkeys(UP_PARTS[not feed_forward.is_gated :], inner_size)
        up_sizes = equal_parts(sum(up_parts.values()), len(names.up))
        inner = {
            UP: group(UP, names.up, up_sizes, hidden_size, parts=up_parts),
            DOWN: group(DOWN, (names.down,), (hidden_size,), inner_size),
        }
    else:
        feed_forward = with_experts(feed_forward, traits.experts, names, prefix)
        inner = expert_groups(feed_forward, traits.experts, names.experts, hidden_size, group)

    return LayerSpec(
        mixer=_with_head_norms(attention, traits, prefix),
        feed_forward=feed_forward,
        norms=_layer_norms(traits, prefix, hidden_size),
        linears={
            QKV: group(
                *(QKV, names.qkv[: len(qkv_sizes)], qkv_sizes, hidden_size),
                parts=heads,
                head_dim=attention.head_dim,
            ),
            OUTPUT: group(OUTPUT, (names.o,), (hidden_size,), attention.q_size),
            **inner,
        },
        is_parallel=traits.is_parallel,
        residual_factor=traits.residual_factor,
    )


def _linear_group(
    traits: Traits,
    prefix: str,
    name: str,
    paths: tuple[str, ...],
    sizes: tuple[int, ...],
    in_features: int,
    modules: tuple[str, ...] = (),
    num_experts: int | None = None,
    parts: Mapping[str, int] = MappingProxyType({}),
    head_dim: int | None = None,
) -> LinearGroup:
    """Return a group of the layer whose tensors begin with the prefix.

    paths, sizes: path and number of outputs of each linear layer. modules: their names; empty: the
    paths have them.
    """
    modules = modules or tuple(map(traits.names.module, paths))
    return LinearGroup(
        paths=tuple(prefix + path for path in paths),
        outputs=dict(zip(modules, sizes, strict=True)),
        in_features=in_features,
        has_bias=name in traits.biased,
        parts=parts,
        head_dim=head_dim,
        num_experts=num_experts,
        is_row=name in _ROW_GROUPS,
    )


def _layer_norms(traits: Traits, prefix: str, hidden_size: int) -> dict[NormPlace, NormSpec]:
    """Return the norms of a layer, of those places that the family has a name for."""
    names = traits.names
    norms = {
        place: _norm_at(traits.norm, prefix, name, hidden_size)
        for place, name in (
            (NormPlace.BEFORE_MIXER, names.input_norm),
            (NormPlace.AFTER_MIXER, names.attention_output_norm),
            (NormPlace.BEFORE_FEED_FORWARD, names.feed_forward_norm),
            (NormPlace.AFTER_FEED_FORWARD, names.feed_forward_output_norm),
        )
    }
    return {place: norm for place, norm in norms.items() if norm is not None}


def _norm_at(norm: NormSpec, prefix: str, name: str, size: int) -> NormSpec | None:
    return dataclasses.replace(norm, path=prefix + name, size=size) if name else None


def _with_head_norms(attention: AttentionSpec, traits: Traits, prefix: str) -> AttentionSpec:
    if traits.head_norm is None:
        return attention
    q_norm, k_norm = (
        dataclasses.replace(
            traits.head_norm,
            path=prefix + name,
            size=attention.head_dim * (num_heads if traits.normalizes_heads_together else 1),
            eps=traits.norm.eps,
            num_heads=num_heads if traits.has_weights_per_head else None,
        )
        for name, num_heads in (
            (traits.names.q_norm, attention.num_heads),
            (traits.names.k_norm, attention.num_kv_heads),
        )
    )
    own = None if attention.kv_distance else k_norm
    return dataclasses.replace(attention, q_norm=q_norm, k_norm=own)


def sliding_layers(fields: ConfigFields, default: Sequence[bool]) -> tuple[bool, ...]:
    """Read from `layer_types` which layers have a window. default: of files without the field."""
    types = fields.layer_types(LAYER_TYPES)
    return tuple(kind == SLIDING_ATTENTION for kind in types) or tuple(default)


def refuse_fields(fields: ConfigFields, *, has_experts: bool = False) -> None:
    """Raise UnsupportedModelError for fields that no family supports, or not this one."""
    for name in () if has_experts else _EXPERT_FIELDS:
        if name in fields:
            raise UnsupportedModelError(
                f"{fields.source} has {name}, but models of this architecture are dense; "
                "docs/models.md names those with experts"
            )


def require_switches(fields: ConfigFields, values: Mapping[str, bool | str]) -> None:
    """Raise UnsupportedModelError if a field that is there has another value than the given one."""
    for name, value in values.items():
        if isinstance(value, bool):
            got: bool | str = fields.boolean(name, value)
        else:
            got = fields.text(name, value)
        if got != value:
            shown = json.dumps(got)
            raise UnsupportedModelError(f"{fields.source}: {name} {shown} is not supported")


def read_activation(fields: ConfigFields) -> Activation:
    """Read `hidden_act`. Raises UnsupportedModelError for one that no kernel computes."""
    name = fields.text("hidden_act", "silu")
    if name not in _ACTIVATIONS:
        raise UnsupportedModelError(
            f"{fields.source}: {fields.own_name('hidden_act')} {name!r} is not supported; "
            f"supported: {', '.join(_ACTIVATIONS)}"
        )
    return _ACTIVATIONS[name]


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


def periodic_windows(fields: ConfigFields, period: int) -> tuple[int | None, ...]:
    """Return the window of each layer; 4096 where none is stated, as in transformers."""
    window = fields.positive_or_null("sliding_window", 4096)
    default = [(index + 1) % period != 0 for index in range(fields.num_layers)]
    return tuple(
        int(window) if is_sliding and window is not None else None
        for is_sliding in sliding_layers(fields, default)
    )


def windows_by_switch(
    fields: ConfigFields, has_window: Callable[[int, int], bool] = operator.ge
) -> tuple[int | None, ...]:
    """Return the window of each layer by Qwen's rule: only if `use_sliding_window` is true.

    has_window: whether a layer has one, by its number and by `max_window_layers`, in files without
    `layer_types`.
    """
    window = None
    if fields.boolean("use_sliding_window", False):
        window = fields.positive_or_null("sliding_window", 4096)
    limit = fields.optional_integer("max_window_layers")
    limit = 28 if limit is None else limit
    default = [has_window(index, limit) for index in range(fields.num_layers)]
    return tuple(
        int(window) if is_sliding and window is not None else None
        for is_sliding in sliding_layers(fields, default)
    )


def reading_later_positions(spec: ModelSpec) -> ModelSpec:
    """Return the model as transformers has it where config.json has `is_causal` false."""

    def changed(attention: AttentionSpec, _layer: int) -> AttentionSpec:
        # Its window for both directions is one longer than that for earlier positions alone.
        window = None if attention.window is None else attention.window + 1
        return dataclasses.replace(attention, is_causal=False, window=window)

    return spec.map_mixers(AttentionSpec, changed)


def ropes_of_windows(
    fields: ConfigFields, windows: Sequence[int | None], sliding_theta: float
) -> tuple[RopeConfig, ...]:
    """Return the rotary embedding of each layer, by whether it has a window.

    sliding_theta: theta of layers with a window, where no field states it.
    """
    head_dim = fields.integer("hidden_size") // fields.integer("num_attention_heads")
    ropes = read_layer_ropes(
        fields,
        fields.integer("head_dim", head_dim),
        fields.integer("max_position_embeddings"),
        sliding_theta,
    )
    return tuple(ropes[FULL_ATTENTION if w is None else SLIDING_ATTENTION] for w in windows)


def heads_in_groups(num_heads: int, num_kv_heads: int) -> tuple[int, ...]:
    """Return the order for rows that have, for each key head, its queries, itself, its value."""
    if num_kv_heads == 1 or num_heads % num_kv_heads:
        return ()  # in order; and what cannot be grouped is refused where the heads are read
    num_queries = num_heads // num_kv_heads
    size = num_queries + 2
    starts = range(0, num_kv_heads * size, size)
    queries = (start + query for start in starts for query in range(num_queries))
    keys = (start + num_queries for start in starts)
    values = (start + num_queries + 1 for start in starts)
    return (*queries, *keys, *values)


def alibi_slopes(num_heads: int) -> tuple[float, ...]:
    """Return the slope of each head.

    For a power of 2 they are a geometric series. For another number the series of the power below
    comes first, then every other slope of the power above.
    """
    power = 1 << (num_heads.bit_length() - 1)
    slopes = (*_series(power), *_series(2 * power)[::2])
    return tuple(itertools.islice(slopes, num_heads))


def _series(num_heads: int) -> tuple[float, ...]:
    return tuple(2.0 ** (-8.0 * n / num_heads) for n in range(1, num_heads + 1))


_SHARED: Final = ("dtype", "torch_dtype", "eos_token_id", "bos_token_id", "pad_token_id")
"""Fields of the wrapper that count where text_config lacks them."""


def read_text_tower(
    fields: ConfigFields,
    architecture: str,
    read: Callable[[ConfigFields], ModelSpec],
    *,
    ties: bool,
) -> ModelSpec:
    """Read text_config by the family's reader. Raises ConfigError or UnsupportedModelError.

    ties: whether the head is the embedding in a wrapper that does not state it.
    """
    spec = read(language_model_fields(fields, ties=ties))
    names = dataclasses.replace(
        spec.names,
        other_roots=("language_model.model.", "model.language_model.", "language_model."),
        ignored=rf"{spec.names.ignored}|(model\.)?(visual|vision_(tower|model)|multi_modal_projector)\..*",
    )
    return dataclasses.replace(spec, architecture=architecture, names=names)


def language_model_fields(fields: ConfigFields, *, ties: bool) -> ConfigFields:
    """Return text_config as the config.json of a language model alone. Raises ConfigError."""
    refuse_fields(fields)
    text = fields.table("text_config")
    if text is None:
        raise ConfigError(f"{fields.source}: text_config is missing")
    shared = {name: fields.values[name] for name in _SHARED if name in fields}
    is_tied = fields.boolean("tie_word_embeddings", ties)
    return text.renamed({}, shared).with_values({"tie_word_embeddings": is_tied})
