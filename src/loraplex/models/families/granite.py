"""Granite 3 and 4: Llama with a factor of the embedding, scores, residual additions and logits.

Some have experts, and some of these a shared expert in addition.
"""

import dataclasses
from typing import Final

from loraplex.kernels.routing_rules import RoutingMode
from loraplex.models.config_fields import ConfigFields
from loraplex.models.decoder_names import DecoderNames, ExpertNames, StackedExperts
from loraplex.models.expert_config import ExpertTraits, read_routing
from loraplex.models.families.llama import llama_biases
from loraplex.models.family_config import Traits, read_decoder
from loraplex.models.spec import ModelSpec
from loraplex.models.specs.attention import OUTPUT, QKV

ARCHITECTURE: Final = "GraniteForCausalLM"
ARCHITECTURE_MOE: Final = "GraniteMoeForCausalLM"
ARCHITECTURE_MOE_SHARED: Final = "GraniteMoeSharedForCausalLM"

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
_DEFAULTS: Final = {"max_position_embeddings": 2048}


def read_config(fields: ConfigFields) -> ModelSpec:
    fields = fields.renamed({}, _DEFAULTS)
    return _read(fields, ARCHITECTURE, Traits(biased=llama_biases(fields)))


def read_config_moe(fields: ConfigFields) -> ModelSpec:
    return _read_moe(fields, ARCHITECTURE_MOE, shared_size=0)


def read_config_moe_shared(fields: ConfigFields) -> ModelSpec:
    shared_size = fields.optional_integer("shared_intermediate_size") or 0
    return _read_moe(fields, ARCHITECTURE_MOE_SHARED, shared_size)


def _read_moe(fields: ConfigFields, architecture: str, shared_size: int) -> ModelSpec:
    fields = fields.renamed({}, {**_DEFAULTS, "num_experts_per_tok": 2})
    routing = read_routing(fields, RoutingMode.CHOSEN_SOFTMAX, default_num_experts=8)
    traits = Traits(
        names=_MOE_NAMES,
        biased=(QKV, OUTPUT) if fields.boolean("attention_bias", False) else (),
        experts=ExpertTraits(routing=routing, shared_size=shared_size),
    )
    return _read(fields, architecture, traits)


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
