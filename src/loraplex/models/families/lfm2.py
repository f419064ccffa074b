"""LFM2: most layers have a gated convolution over a few positions, the others attention.

Some have experts in all layers but the first ones.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

from loraplex.kernels.activations import Activation
from loraplex.kernels.routing_rules import RoutingMode
from loraplex.models.config_fields import ConfigFields
from loraplex.models.decoder_names import DecoderNames, ExpertNames
from loraplex.models.expert_config import ExpertTraits, read_routing
from loraplex.models.family_config import RMS_NORM, Traits, read_decoder
from loraplex.models.linear_group import LinearGroup
from loraplex.models.rope_config import FULL_ATTENTION
from loraplex.models.spec import LayerSpec, ModelSpec
from loraplex.models.specs.attention import OUTPUT, QKV
from loraplex.models.specs.convolution import CONV_IN, CONV_OUT, ConvSpec

ARCHITECTURE: Final = "Lfm2ForCausalLM"
ARCHITECTURE_MOE: Final = "Lfm2MoeForCausalLM"

_CONV: Final = "conv"
"""Value of layer_types, and the name of such a mixer within the layer."""
_GATE, _UP, _DOWN = (f"feed_forward.experts.{{expert}}.{part}" for part in ("w1", "w3", "w2"))
_NAMES: Final = DecoderNames(
    input_norm="operator_norm",
    feed_forward_norm="ffn_norm",
    final_norm="embedding_norm",
    q_norm="self_attn.q_layernorm",
    k_norm="self_attn.k_layernorm",
    o="self_attn.out_proj",
    up=("feed_forward.w1", "feed_forward.w3"),
    down="feed_forward.w2",
    experts=ExpertNames(
        router="feed_forward.gate",
        up=(_GATE, _UP),
        down=_DOWN,
        selection_bias="feed_forward.expert_bias",
    ),
)
_DEFAULTS: Final[Mapping[str, Any]] = {
    "num_key_value_heads": 8,
    "max_position_embeddings": 128_000,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
}
_SUM_FLOOR: Final = 1e-6


def read_config(fields: ConfigFields) -> ModelSpec:
    fields = _renamed(fields, {"intermediate_size": 12_288})
    if "block_ff_dim" in fields:
        fields = fields.with_values({"intermediate_size": fields.integer("block_ff_dim")})
    if fields.boolean("block_auto_adjust_ff_dim", True):
        fields = fields.with_values({"intermediate_size": _adjusted_size(fields)})
    return _read(fields, ARCHITECTURE, Traits(names=_NAMES))


def read_config_moe(fields: ConfigFields) -> ModelSpec:
    fields = _renamed(fields, {"intermediate_size": 7168, "num_experts_per_tok": 4})
    routing = read_routing(
        fields,
        RoutingMode.SIGMOID,
        default_num_experts=32,
        normalizes=fields.boolean("norm_topk_prob", True),
    )
    has_bias = fields.boolean("use_expert_bias", True)
    experts = ExpertTraits(
        routing=dataclasses.replace(
            routing, factor=fields.positive("routed_scaling_factor", 1.0), sum_floor=_SUM_FLOOR
        ),
        inner_size=fields.integer("moe_intermediate_size", 1792),
        dense_layers=frozenset(range(_num_dense_layers(fields))),
    )
    names = _NAMES
    if not has_bias:
        own = dataclasses.replace(names.experts, selection_bias="")
        names = dataclasses.replace(names, experts=own)
    return _read(fields, ARCHITECTURE_MOE, Traits(names=names, experts=experts))


def _renamed(fields: ConfigFields, defaults: Mapping[str, Any]) -> ConfigFields:
    fields = fields.renamed({"rms_norm_eps": "norm_eps"}, {**_DEFAULTS, **defaults})
    if "tie_embedding" not in fields:
        return fields
    return fields.with_values({"tie_word_embeddings": fields.boolean("tie_embedding", True)})


def _num_dense_layers(fields: ConfigFields) -> int:
    number = fields.optional_integer("num_dense_layers")
    return 2 if number is None else number


def _adjusted_size(fields: ConfigFields) -> int:
    """Return the inner size that the class in transformers makes of intermediate_size."""
    size = 2 * fields.integer("intermediate_size") // 3
    factor = fields.positive_or_null("block_ffn_dim_multiplier", 1.0)
    if factor is None:
        return size
    multiple = fields.integer("block_multiple_of", 256)
    return -(-int(factor * size) // multiple) * multiple


def _read(fields: ConfigFields, architecture: str, traits: Traits) -> ModelSpec:
    """Read a decoder whose layers all attend, and put convolutions in their place."""
    traits = dataclasses.replace(
        traits, rotates_whole_heads=True, head_norm=RMS_NORM, activation=Activation.SILU
    )
    spec = read_decoder(fields, architecture, traits)
    num_taps, has_bias = fields.integer("conv_L_cache", 3), fields.boolean("conv_bias", False)
    attends = _attending_layers(fields)

    def layer(index: int) -> LayerSpec:
        own = spec.layers[index]
        if attends[index]:
            return own
        return _convolving(own, _NAMES.layer(index), spec.hidden_size, num_taps, has_bias=has_bias)

    return dataclasses.replace(spec, layers=tuple(map(layer, range(spec.num_layers))))


def _convolving(
    layer: LayerSpec, prefix: str, size: int, num_taps: int, *, has_bias: bool
) -> LayerSpec:
    """Return the layer with a convolution in the place of its attention."""

    def group(name: str, out_features: int, *, is_row: bool = False) -> LinearGroup:
        return LinearGroup(
            paths=(f"{prefix}{_CONV}.{name}",),
            outputs={name: out_features},
            in_features=size,
            has_bias=has_bias,
            is_row=is_row,
        )

    rest = {name: own for name, own in layer.linears.items() if name not in (QKV, OUTPUT)}
    return dataclasses.replace(
        layer,
        mixer=ConvSpec(
            num_channels=size,
            num_taps=num_taps,
            path=f"{prefix}{_CONV}.{_CONV}",
            has_bias=has_bias,
        ),
        linears={
            CONV_IN: group("in_proj", 3 * size),
            CONV_OUT: group("out_proj", size, is_row=True),
            **rest,
        },
    )


def _attending_layers(fields: ConfigFields) -> tuple[bool, ...]:
    """Return for each layer whether it attends: `layer_types`, or the older `full_attn_idxs`."""
    kinds = fields.layer_types((_CONV, FULL_ATTENTION))
    if not kinds:
        layers = range(fields.num_layers)
        attending = fields.integers("full_attn_idxs") or layers
        return tuple(index in attending for index in layers)
    return tuple(kind == FULL_ATTENTION for kind in kinds)
