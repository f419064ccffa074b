"""MiniMax M2: Mixtral whose router has sigmoids, and norms of all query and all key heads."""

import dataclasses
from collections.abc import Mapping
from typing import Final

from loraplex.kernels.routing_rules import RoutingMode
from loraplex.models.config_fields import ConfigFields
from loraplex.models.expert_config import ExpertTraits, read_routing
from loraplex.models.families import mixtral
from loraplex.models.family_config import RMS_NORM, Traits, read_decoder, require_switches
from loraplex.models.spec import ModelSpec

ARCHITECTURE: Final = "MiniMaxM2ForCausalLM"

_NAMES: Final = dataclasses.replace(
    mixtral.NAMES,
    experts=dataclasses.replace(
        mixtral.NAMES.experts, selection_bias="block_sparse_moe.e_score_correction_bias"
    ),
)
_DEFAULTS: Final = {
    "max_position_embeddings": 196_608,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "num_experts_per_tok": 8,
    "rope_theta": 5e6,
}
_NEEDED: Final[Mapping[str, bool | str]] = {
    "qk_norm_type": "per_layer",
    "scoring_func": "sigmoid",
    "use_qk_norm": True,
    "use_routing_bias": True,
}


def read_config(fields: ConfigFields) -> ModelSpec:
    """Read a config.json; rotary_dim is how much of a head turns."""
    require_switches(fields, _NEEDED)
    fields = fields.renamed({}, _DEFAULTS)
    if "rotary_dim" in fields:
        partial = fields.integer("rotary_dim") / fields.integer("head_dim")
        fields = fields.renamed({}, {"partial_rotary_factor": partial})
    routing = read_routing(fields, RoutingMode.SIGMOID, default_num_experts=256, normalizes=True)
    traits = Traits(
        names=_NAMES,
        head_norm=RMS_NORM,
        normalizes_heads_together=True,
        experts=ExpertTraits(routing=dataclasses.replace(routing, sum_floor=0.0)),
    )
    return read_decoder(fields, ARCHITECTURE, traits)
