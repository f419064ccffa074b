"""Granite 3 and 4: Llama with a factor of the embedding, scores, residual additions and logits.

Some have experts, and some of these a shared expert in addition. Most layers of Granite 4 H have a
state space instead of attention; those of its models without experts have a shared one alone.
"""

import dataclasses
from typing import Final

from loraplex.core.errors import UnsupportedModelError
from loraplex.kernels.routing_rules import RoutingMode
from loraplex.models.config_fields import ConfigFields
from loraplex.models.decoder_names import DecoderNames, ExpertNames, StackedExperts
from loraplex.models.expert_config import (
    FUSED_SHARED_UP_MODULE,
    SHARED_DOWN_MODULE,
    ExpertTraits,
    read_routing,
)
from loraplex.models.families.llama import llama_biases
from loraplex.models.family_config import Traits, read_decoder
from loraplex.models.spec import DOWN, SHARED_UP_MODULES, UP, LayerSpec, ModelSpec
from loraplex.models.specs.attention import OUTPUT, QKV
from loraplex.models.ssm_config import SSM_DEFAULTS, state_layers, with_state_spaces

ARCHITECTURE: Final = "GraniteForCausalLM"
ARCHITECTURE_MOE: Final = "GraniteMoeForCausalLM"
ARCHITECTURE_MOE_SHARED: Final = "GraniteMoeSharedForCausalLM"
ARCHITECTURE_HYBRID: Final = "GraniteMoeHybridForCausalLM"

_GATE, _UP, _DOWN = (
    f"block_sparse_moe.experts.{{expert}}.{part}_proj" for part in ("gate", "up", "down")
)
_STACKED: Final = (
    StackedExperts(
        tensor="block_sparse_moe.input_linear.weight", parts=(f"{_GATE}.weight", f"{_UP}.weight")
    ),
    StackedExperts(tensor="block_sparse_moe.output_linear.weight", parts=(f"{_DOWN}.weight",)),
)
_MOE_NAMES: Final = DecoderNames(
    experts=ExpertNames(
        router="block_sparse_moe.router.layer",
        up=(_GATE, _UP),
        down=_DOWN,
        shared_up=("shared_mlp.input_linear",),
        shared_down="shared_mlp.output_linear",
        stacked=_STACKED,
    ),
    other_parts={"block_sparse_moe.router.weight": "block_sparse_moe.router.layer.weight"},
)
_SHARED_ALONE: Final = DecoderNames(
    up=_MOE_NAMES.experts.shared_up, down=_MOE_NAMES.experts.shared_down
)
_DEFAULTS: Final = {"max_position_embeddings": 2048}
_HYBRID_DEFAULTS: Final = {
    **_DEFAULTS,
    **SSM_DEFAULTS,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "shared_intermediate_size": 1024,
}


def read_config(fields: ConfigFields) -> ModelSpec:
    fields = fields.renamed({}, _DEFAULTS)
    return _read(fields, ARCHITECTURE, Traits(biased=llama_biases(fields)))


def read_config_moe(fields: ConfigFields) -> ModelSpec:
    return _read_moe(fields, ARCHITECTURE_MOE, shared_size=0)


def read_config_moe_shared(fields: ConfigFields) -> ModelSpec:
    shared_size = fields.optional_integer("shared_intermediate_size") or 0
    return _read_moe(fields, ARCHITECTURE_MOE_SHARED, shared_size)


def read_config_hybrid(fields: ConfigFields) -> ModelSpec:
    fields = fields.renamed({}, _HYBRID_DEFAULTS)
    is_dense = fields.optional_integer("num_local_experts") == 0
    if is_dense:
        fields = fields.renamed(
            {"num_local_experts": "", "intermediate_size": "shared_intermediate_size"}, {}
        )
        traits = Traits(names=_SHARED_ALONE, biased=_attention_biases(fields))
    else:
        traits = _moe_traits(fields, fields.integer("shared_intermediate_size"))
    traits = dataclasses.replace(traits, rotates=(_rotates(fields),))
    spec = _read(fields, ARCHITECTURE_HYBRID, traits)
    if is_dense:
        layers = tuple(map(_with_shared_alone, spec.layers))
        spec = dataclasses.replace(spec, layers=layers)
    return with_state_spaces(spec, fields, state_layers(fields), "mamba")


def _rotates(fields: ConfigFields) -> bool:
    """Read whether attention has a rotary embedding. Raises UnsupportedModelError."""
    kind = fields.text("position_embedding_type", "nope")
    if kind not in ("rope", "nope"):
        raise UnsupportedModelError(
            f"{fields.source}: position_embedding_type {kind!r} is not supported; "
            "supported: rope, nope"
        )
    return kind == "rope"


def _with_shared_alone(layer: LayerSpec) -> LayerSpec:
    """Return the layer with the names that its feed-forward part has in models with experts."""
    up, down = layer.linears[UP], layer.linears[DOWN]
    parts = dict(zip(SHARED_UP_MODULES, up.parts.values(), strict=True))
    (up_size,), (down_size,) = up.outputs.values(), down.outputs.values()
    groups = {
        UP: dataclasses.replace(up, outputs={FUSED_SHARED_UP_MODULE: up_size}, parts=parts),
        DOWN: dataclasses.replace(down, outputs={SHARED_DOWN_MODULE: down_size}),
    }
    return dataclasses.replace(layer, linears={**layer.linears, **groups})


def _read_moe(fields: ConfigFields, architecture: str, shared_size: int) -> ModelSpec:
    fields = fields.renamed({}, {**_DEFAULTS, "num_experts_per_tok": 2})
    return _read(fields, architecture, _moe_traits(fields, shared_size))


def _moe_traits(fields: ConfigFields, shared_size: int) -> Traits:
    routing = read_routing(fields, RoutingMode.CHOSEN_SOFTMAX, default_num_experts=8)
    return Traits(
        names=_MOE_NAMES,
        biased=_attention_biases(fields),
        experts=ExpertTraits(routing=routing, shared_size=shared_size),
    )


def _attention_biases(fields: ConfigFields) -> tuple[str, ...]:
    return (QKV, OUTPUT) if fields.boolean("attention_bias", False) else ()


def _read(fields: ConfigFields, architecture: str, traits: Traits) -> ModelSpec:
    """Read the four factors, in addition to the traits."""
    traits = dataclasses.replace(
        traits,
        rotates_whole_heads=True,
        score_scale=fields.positive("attention_multiplier", 1.0),
        residual_factor=fields.positive("residual_multiplier", 1.0),
    )
    return dataclasses.replace(
        read_decoder(fields, architecture, traits),
        embedding_factor=fields.positive("embedding_multiplier", 1.0),
        logits_factor=1.0 / fields.positive("logits_scaling", 1.0),
    )
