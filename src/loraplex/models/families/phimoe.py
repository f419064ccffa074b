"""Phi-3.5-MoE: layer norms, and two experts per token, each with a weight of its own choice."""

import dataclasses
from typing import Final

from loraplex.core.errors import UnsupportedModelError
from loraplex.kernels.routing_rules import RoutingMode, RoutingRules
from loraplex.models.config_fields import ConfigFields
from loraplex.models.expert_config import ExpertTraits, read_routing
from loraplex.models.families.mixtral import NAMES
from loraplex.models.family_config import LAYER_NORM, Traits, read_decoder
from loraplex.models.spec import ModelSpec
from loraplex.models.specs.attention import OUTPUT, QKV

ARCHITECTURE: Final = "PhimoeForCausalLM"
ARCHITECTURE_PUBLISHED: Final = "PhiMoEForCausalLM"
"""Spelling of the published files."""

_NAMES: Final = dataclasses.replace(
    NAMES, other_parts={"mlp.router.": "block_sparse_moe.gate.", **NAMES.other_parts}
)
_NUM_CHOSEN: Final = 2
_DEFAULTS: Final = {
    "max_position_embeddings": 131_072,
    "num_key_value_heads": 8,
    "num_experts_per_tok": _NUM_CHOSEN,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
}


def read_config(fields: ConfigFields) -> ModelSpec:
    fields = _with_attention_factor(fields.renamed({}, _DEFAULTS))
    window = fields.optional_integer("sliding_window")
    traits = Traits(
        names=_NAMES,
        windows=(window,),
        rotates_whole_heads=True,
        biased=(QKV, OUTPUT) if fields.boolean("attention_bias", False) else (),
        norm=LAYER_NORM,
        experts=ExpertTraits(routing=_read_routing(fields)),
    )
    return dataclasses.replace(
        read_decoder(fields, ARCHITECTURE, traits),
        has_lm_head_bias=fields.boolean("lm_head_bias", False),
    )


def _read_routing(fields: ConfigFields) -> RoutingRules:
    routing = read_routing(fields, RoutingMode.SPARSE_MIXER, default_num_experts=16)
    if routing.num_chosen != _NUM_CHOSEN:
        raise UnsupportedModelError(
            f"{fields.source}: num_experts_per_tok {routing.num_chosen} is not supported in this "
            f"architecture; supported: {_NUM_CHOSEN}"
        )
    return dataclasses.replace(routing, jitter=fields.number("router_jitter_noise", 0.01))


def _with_attention_factor(fields: ConfigFields) -> ConfigFields:
    """Return the fields with longrope's factor of cosines and sines, which has own names here."""
    for name in ("rope_scaling", "rope_parameters"):
        rope = fields.table(name)
        rope_type = rope and rope.text("rope_type", rope.text("type", "default"))
        if rope is None or rope_type == "default":
            continue
        if rope_type != "longrope":
            raise UnsupportedModelError(
                f"{rope.source}: rope type {rope_type!r} is not supported in this architecture; "
                "supported: default, longrope"
            )
        factor, long_factor = rope.number("short_mscale"), rope.number("long_mscale")
        if factor != long_factor:
            raise UnsupportedModelError(
                f"{rope.source}: short_mscale ({factor:g}) and long_mscale ({long_factor:g}) must "
                "be equal: factors that differ are not supported"
            )
        fields = fields.with_values({name: {**rope.values, "attention_factor": factor}})
    return fields
