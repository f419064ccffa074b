"""Qwen 3.5 and Qwen3-Next: a gated delta rule in three of four layers, attention with a gate.

Qwen 3.5 is dense or has experts, alone or as the language model of a multimodal wrapper.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

from loraplex.core.errors import ConfigError
from loraplex.kernels.routing_rules import RoutingMode
from loraplex.models.config_fields import ConfigFields
from loraplex.models.decoder_names import DecoderNames, ExpertNames
from loraplex.models.expert_config import ExpertTraits, read_routing
from loraplex.models.family_config import (
    Traits,
    read_decoder,
    read_text_tower,
    require_switches,
)
from loraplex.models.linear_group import LinearGroup
from loraplex.models.rope_config import FULL_ATTENTION
from loraplex.models.spec import LayerSpec, ModelSpec
from loraplex.models.specs.attention import OUTPUT, QKV
from loraplex.models.specs.delta import DELTA_GATES, DELTA_IN, DELTA_OUT, DeltaSpec
from loraplex.models.specs.part import NormSpec

ARCHITECTURE_3_5: Final = "Qwen3_5ForCausalLM"
WRAPPER_3_5: Final = "Qwen3_5ForConditionalGeneration"
ARCHITECTURE_3_5_MOE: Final = "Qwen3_5MoeForCausalLM"
WRAPPER_3_5_MOE: Final = "Qwen3_5MoeForConditionalGeneration"
ARCHITECTURE_NEXT: Final = "Qwen3NextForCausalLM"

_NORM: Final = NormSpec("", 0, 1e-6, weight_offset=1.0, is_rounded_once=True)
_INPUTS: Final = ("in_proj_q", "in_proj_k", "in_proj_v", "in_proj_z")
_LINEAR_ATTENTION: Final = "linear_attention"
_NAMES: Final = DecoderNames(
    # Text checkpoints by others than Qwen keep the wrapper's names.
    other_roots=("model.language_model.", "language_model.model.", "language_model."),
    experts=ExpertNames(
        shared_up=("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
        shared_down="mlp.shared_expert.down_proj",
        shared_gate="mlp.shared_expert_gate",
    ),
    # The layer that drafts tokens, and the tower of images.
    ignored=rf"{DecoderNames().ignored}|mtp\..*|(model\.)?visual\..*",
)
_DEFAULTS: Final[Mapping[str, Any]] = {
    "vocab_size": 248_320,
    "hidden_size": 4096,
    "intermediate_size": 12_288,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 32_768,
    "partial_rotary_factor": 0.25,
}
_MOE_DEFAULTS: Final = {
    **_DEFAULTS,
    "hidden_size": 2048,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}
_NEXT_DEFAULTS: Final = {
    **_MOE_DEFAULTS,
    "vocab_size": 151_936,
    "intermediate_size": 5632,
    "num_hidden_layers": 48,
    "num_experts_per_tok": 10,
}


def read_config_3_5(fields: ConfigFields) -> ModelSpec:
    return _read(fields.renamed({}, _DEFAULTS), ARCHITECTURE_3_5, None)


def read_config_3_5_moe(fields: ConfigFields) -> ModelSpec:
    fields = fields.renamed({}, _MOE_DEFAULTS)
    experts = _read_experts(fields, default_num_experts=256, normalizes=True)
    return _read(fields, ARCHITECTURE_3_5_MOE, experts)


def read_wrapper_3_5(fields: ConfigFields) -> ModelSpec:
    return _with_names(read_text_tower(fields, WRAPPER_3_5, read_config_3_5, ties=False))


def read_wrapper_3_5_moe(fields: ConfigFields) -> ModelSpec:
    return _with_names(read_text_tower(fields, WRAPPER_3_5_MOE, read_config_3_5_moe, ties=False))


def read_config_next(fields: ConfigFields) -> ModelSpec:
    fields = fields.renamed({}, _NEXT_DEFAULTS)
    normalizes = fields.boolean("norm_topk_prob", True)
    experts = _read_experts(fields, default_num_experts=512, normalizes=normalizes)
    step, listed = fields.integer("decoder_sparse_step", 1), fields.integers("mlp_only_layers")
    dense = (i for i in range(fields.num_layers) if i in listed or (i + 1) % step)
    experts = dataclasses.replace(experts, dense_layers=frozenset(dense))
    return _read(fields, ARCHITECTURE_NEXT, experts, is_grouped=True)


def _with_names(spec: ModelSpec) -> ModelSpec:
    return dataclasses.replace(spec, names=_NAMES)


def _read_experts(
    fields: ConfigFields, *, default_num_experts: int, normalizes: bool
) -> ExpertTraits:
    return ExpertTraits(
        routing=read_routing(
            fields,
            RoutingMode.SOFTMAX,
            default_num_experts=default_num_experts,
            normalizes=normalizes,
        ),
        inner_size=fields.integer("moe_intermediate_size"),
        shared_size=fields.integer("shared_expert_intermediate_size"),
    )


def _read(
    fields: ConfigFields,
    architecture: str,
    experts: ExpertTraits | None,
    *,
    is_grouped: bool = False,
) -> ModelSpec:
    require_switches(fields, {"attn_output_gate": True, "mamba_ssm_dtype": "float32"})
    is_full = _full_layers(fields)
    traits = Traits(
        names=_NAMES,
        biased=(QKV, OUTPUT) if fields.boolean("attention_bias", False) else (),
        norm=_NORM,
        head_norm=_NORM,
        has_output_gate=True,
        experts=experts,
    )
    spec = read_decoder(fields, architecture, traits)
    # Text has one position for all three axes of mrope.
    delta = _read_delta(fields, spec, is_grouped=is_grouped)
    layers = tuple(
        layer if full else _with_delta(layer, delta, spec.names.layer(index), spec.hidden_size)
        for index, (layer, full) in enumerate(zip(spec.layers, is_full, strict=True))
    )
    return dataclasses.replace(spec, layers=layers)


def _full_layers(fields: ConfigFields) -> tuple[bool, ...]:
    """Return which layers attend. Raises ConfigError, UnsupportedModelError."""
    types = fields.layer_types((_LINEAR_ATTENTION, FULL_ATTENTION))
    if not types:
        interval = fields.integer("full_attention_interval", 4)
        return tuple((index + 1) % interval == 0 for index in range(fields.num_layers))
    return tuple(kind == FULL_ATTENTION for kind in types)


def _read_delta(fields: ConfigFields, spec: ModelSpec, *, is_grouped: bool) -> DeltaSpec:
    """Read what all layers with a delta rule share. Raises ConfigError."""
    num_keys = fields.integer("linear_num_key_heads", 16)
    num_values = fields.integer("linear_num_value_heads", 32)
    if num_values % num_keys:
        raise ConfigError(
            f"{fields.source}: linear_num_value_heads ({num_values}) must be a multiple of "
            f"linear_num_key_heads ({num_keys})"
        )
    (activation,) = {each.feed_forward.activation for each in spec.layers if each.feed_forward}
    value_size = fields.integer("linear_value_head_dim", 128)
    return DeltaSpec(
        num_key_heads=num_keys,
        num_value_heads=num_values,
        key_size=fields.integer("linear_key_head_dim", 128),
        value_size=value_size,
        kernel_size=fields.integer("linear_conv_kernel_dim", 4),
        activation=activation,
        path="",
        norm=NormSpec("", value_size, spec.final_norm.eps),
        is_grouped=is_grouped,
    )


def _with_delta(layer: LayerSpec, delta: DeltaSpec, prefix: str, hidden_size: int) -> LayerSpec:
    """Return the layer with a delta rule in the place of its attention."""
    path = f"{prefix}linear_attn."
    q, k, v, z = delta.part_sizes
    num_values = delta.num_value_heads
    if delta.is_grouped:
        inputs, parts = {"in_proj_qkvz": q + k + v + z}, {}
        gates = {"in_proj_ba": 2 * num_values}
        in_head = dict(zip(_INPUTS, delta.head_sizes, strict=True))
        gates_in_head = dict.fromkeys(("in_proj_b", "in_proj_a"), delta.values_per_key)
    else:
        inputs = {"in_proj_qkv": q + k + v, "in_proj_z": z}
        parts = dict(zip(_INPUTS, delta.part_sizes, strict=True))
        in_head, gates_in_head = {}, {}
        gates = {"in_proj_b": num_values, "in_proj_a": num_values}

    def group(outputs: Mapping[str, int], in_features: int, **fields: Any) -> LinearGroup:
        return LinearGroup(
            paths=tuple(path + name for name in outputs),
            outputs=outputs,
            in_features=in_features,
            has_bias=False,
            **fields,
        )

    others = {name: each for name, each in layer.linears.items() if name not in (QKV, OUTPUT)}
    norm = dataclasses.replace(delta.norm, path=f"{path}norm")
    return dataclasses.replace(
        layer,
        mixer=dataclasses.replace(delta, path=path, norm=norm),
        linears={
            DELTA_IN: group(
                inputs, hidden_size, parts=parts, head_parts=in_head, head_dim=delta.key_size
            ),
            DELTA_GATES: group(gates, hidden_size, head_parts=gates_in_head),
            DELTA_OUT: group({"out_proj": hidden_size}, v, is_row=True),
            **others,
        },
    )
