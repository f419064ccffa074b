"""ERNIE 4.5: Llama that rotates in pairs, with a bias in every linear layer or in none.

Some have experts, whose choice a bias shifts: their probabilities, without it, are the weights.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

from loraplex.kernels.routing_rules import RoutingMode
from loraplex.models.config_fields import ConfigFields
from loraplex.models.decoder_names import LLAMA_NAMES, DecoderNames, ExpertNames
from loraplex.models.expert_config import ExpertTraits, read_routing
from loraplex.models.family_config import (
    ALL_BIASED,
    RMS_NORM,
    Traits,
    read_decoder,
    require_switches,
)
from loraplex.models.spec import ModelSpec

ARCHITECTURE: Final = "Ernie4_5ForCausalLM"
ARCHITECTURE_MOE: Final = "Ernie4_5_MoeForCausalLM"

_MOE_NAMES: Final = DecoderNames(
    experts=ExpertNames(
        shared_up=("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
        shared_down="mlp.shared_experts.down_proj",
        selection_bias="mlp.moe_statics.e_score_correction_bias",
        is_selection_bias_row=True,
    ),
    ignored=rf"{LLAMA_NAMES.ignored}|(model\.)?mtp_.*",
)
_TRAITS: Final = Traits(
    norm=dataclasses.replace(RMS_NORM, eps=1e-5),
    is_rope_interleaved=True,
    rotates_whole_heads=True,
)
_DEFAULTS: Final[Mapping[str, Any]] = {
    "max_position_embeddings": 131_072,
    "rope_theta": 500_000.0,
    "tie_word_embeddings": True,
}
_MOE_DEFAULTS: Final = {
    **_DEFAULTS,
    "num_key_value_heads": 4,
    "intermediate_size": 12_288,
    "moe_intermediate_size": 1536,
    "num_experts_per_tok": 6,
}
_MOE_OWN_NAMES: Final = {"num_experts": "moe_num_experts", "num_experts_per_tok": "moe_k"}


def read_config(fields: ConfigFields) -> ModelSpec:
    fields = fields.renamed({}, {**_DEFAULTS, "num_key_value_heads": 2, "head_dim": 128})
    biased = ALL_BIASED if fields.boolean("use_bias", False) else ()
    return read_decoder(fields, ARCHITECTURE, dataclasses.replace(_TRAITS, biased=biased))


def read_config_moe(fields: ConfigFields) -> ModelSpec:
    """Read a config.json; moe_norm_min, which transformers has as a limit, is an addend here."""
    require_switches(fields, {"use_bias": False})
    fields = fields.renamed(_MOE_OWN_NAMES, _MOE_DEFAULTS)
    routing = read_routing(fields, RoutingMode.SOFTMAX, default_num_experts=64, normalizes=True)
    inner_size = fields.integer("moe_intermediate_size")
    num_shared = fields.optional_integer("moe_num_shared_experts")
    experts = ExpertTraits(
        routing=dataclasses.replace(routing, sum_floor=fields.positive("moe_norm_min", 1e-12)),
        inner_size=inner_size,
        shared_size=inner_size * (2 if num_shared is None else num_shared),
        dense_layers=_dense_layers(fields),
    )
    traits = dataclasses.replace(_TRAITS, names=_MOE_NAMES, experts=experts)
    return read_decoder(fields, ARCHITECTURE_MOE, traits)


def _dense_layers(fields: ConfigFields) -> frozenset[int]:
    """Return the layers outside the range of those with experts, or between its steps."""
    first, last = (fields.optional_integer(f"moe_layer_{end}_index") for end in ("start", "end"))
    first = 1 if first is None else first
    last = fields.num_layers - 1 if last is None or last == -1 else last
    interval = fields.integer("moe_layer_interval", 1)
    return frozenset(
        index
        for index in range(fields.num_layers)
        if not first <= index <= last or (index + 1) % interval
    )
