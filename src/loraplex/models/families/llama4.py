"""Llama 4: attention in chunks with rotation, some layers without both, one expert a token."""

import dataclasses
from typing import Final

from loraplex.core.errors import ConfigError, UnsupportedModelError
from loraplex.kernels.routing_rules import RoutingMode
from loraplex.models.config_fields import ConfigFields
from loraplex.models.decoder_names import DecoderNames, ExpertNames, StackedExperts
from loraplex.models.expert_config import ExpertTraits, read_routing
from loraplex.models.families.smollm3 import rotating_layers
from loraplex.models.family_config import RMS_NORM, Traits, read_decoder, read_text_tower
from loraplex.models.spec import ModelSpec
from loraplex.models.specs.attention import OUTPUT, QKV, AttentionSpec
from loraplex.models.specs.part import growth_alone

ARCHITECTURE: Final = "Llama4ForCausalLM"
WRAPPER: Final = "Llama4ForConditionalGeneration"

_EXPERTS: Final = "feed_forward.experts"
_UP: Final = (f"{_EXPERTS}.{{expert}}.gate_proj", f"{_EXPERTS}.{{expert}}.up_proj")
_DOWN: Final = f"{_EXPERTS}.{{expert}}.down_proj"
_SHARED: Final = "feed_forward.shared_expert"
_NAMES: Final = DecoderNames(
    up=("feed_forward.gate_proj", "feed_forward.up_proj"),
    down="feed_forward.down_proj",
    experts=ExpertNames(
        router="feed_forward.router",
        up=_UP,
        down=_DOWN,
        shared_up=(f"{_SHARED}.gate_proj", f"{_SHARED}.up_proj"),
        shared_down=f"{_SHARED}.down_proj",
        stacked=(
            StackedExperts(
                tensor=f"{_EXPERTS}.gate_up_proj",
                parts=tuple(f"{part}.weight" for part in _UP),
                is_transposed=True,
            ),
            StackedExperts(
                tensor=f"{_EXPERTS}.down_proj", parts=(f"{_DOWN}.weight",), is_transposed=True
            ),
        ),
    ),
)
_NORM: Final = dataclasses.replace(RMS_NORM, eps=1e-5)
_DEFAULTS: Final = {
    "max_position_embeddings": 131_072,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rope_theta": 500_000.0,
    "num_experts_per_tok": 1,
}
_CHUNKED: Final = "chunked_attention"
_FULL: Final = "full_attention"


def read_config(fields: ConfigFields) -> ModelSpec:
    fields = fields.renamed({}, _DEFAULTS)
    routing = read_routing(fields, RoutingMode.SIGMOID, default_num_experts=16)
    if routing.num_chosen != 1:
        raise UnsupportedModelError(
            f"{fields.source}: num_experts_per_tok {routing.num_chosen} is not supported in this "
            "architecture; supported: 1"
        )
    inner_size = fields.integer("intermediate_size")
    rotates = rotating_layers(fields)
    traits = Traits(
        names=_NAMES,
        rotates=rotates,
        rotates_whole_heads=True,
        is_rope_interleaved=True,
        biased=(QKV, OUTPUT) if fields.boolean("attention_bias", False) else (),
        norm=_NORM,
        normalizes_after_rotation=True,
        experts=ExpertTraits(
            routing=dataclasses.replace(routing, weighs_input=True),
            inner_size=inner_size,
            shared_size=inner_size,
            dense_layers=frozenset(range(fields.num_layers)) - _expert_layers(fields),
        ),
    )
    dense = fields.renamed(
        {"intermediate_size": "intermediate_size_mlp"}, {"intermediate_size": 16_384}
    )
    spec = read_decoder(dense, ARCHITECTURE, traits)
    chunks = _chunks(fields, rotates)
    norm = None
    if fields.boolean("use_qk_norm", True):
        # Without a path it has no weights.
        size = next(spec.mixers_of(AttentionSpec)).head_dim
        norm = dataclasses.replace(_NORM, size=size, eps=fields.number("rms_norm_eps", _NORM.eps))
    growth = None
    if _is_on(fields, "attn_temperature_tuning"):
        length = fields.integer("floor_scale", 8192)
        growth = growth_alone(fields.number("attn_scale", 0.1), length, offset=1)

    def changed(attention: AttentionSpec, layer: int) -> AttentionSpec:
        attention = dataclasses.replace(attention, chunk=chunks[layer])
        if rotates[layer]:
            return dataclasses.replace(attention, q_norm=norm, k_norm=norm)
        return dataclasses.replace(attention, query_rope=growth)

    return spec.map_mixers(AttentionSpec, changed)


def read_wrapper(fields: ConfigFields) -> ModelSpec:
    return read_text_tower(fields, WRAPPER, read_config, ties=False)


def _is_on(fields: ConfigFields, name: str) -> bool:
    """Read a switch that is on where it is absent, and a number in published files."""
    if isinstance(fields.values.get(name), bool):
        return fields.boolean(name, True)
    return fields.number(name, 1.0) != 0


def _chunks(fields: ConfigFields, rotates: tuple[bool, ...]) -> tuple[int | None, ...]:
    """Return the size of the chunks of each layer: those that rotate have them, or layer_types."""
    size = fields.positive_or_null("attention_chunk_size", 8192)
    types = fields.layer_types((_CHUNKED, _FULL)) or tuple(
        _CHUNKED if does else _FULL for does in rotates
    )
    return tuple(int(size) if size and kind == _CHUNKED else None for kind in types)


def _expert_layers(fields: ConfigFields) -> frozenset[int]:
    """Read `moe_layers`, or else every how many layers one has experts."""
    if "moe_layers" not in fields:
        step = fields.integer("interleave_moe_layer_step", 1)
        return frozenset(range(step - 1, fields.num_layers, step))
    layers = fields.integers("moe_layers")
    if any(layer >= fields.num_layers for layer in layers):
        raise ConfigError(
            f"{fields.source}: moe_layers has {max(layers)}, num_hidden_layers is "
            f"{fields.num_layers}"
        )
    return frozenset(layers)
