"""GLM 4.5 and Solar Open: experts that DeepSeek V3's router chooses, and plain attention."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

from loraplex.kernels.routing_rules import RoutingMode
from loraplex.models.config_fields import ConfigFields
from loraplex.models.decoder_names import DecoderNames, ExpertNames
from loraplex.models.expert_config import ExpertTraits, dense_first_layers, read_grouped_routing
from loraplex.models.family_config import RMS_NORM, Traits, read_decoder
from loraplex.models.latent_config import without_draft_layers
from loraplex.models.spec import ModelSpec
from loraplex.models.specs.attention import QKV

ARCHITECTURE: Final = "Glm4MoeForCausalLM"
ARCHITECTURE_SOLAR: Final = "SolarOpenForCausalLM"

_NAMES: Final = DecoderNames(
    experts=ExpertNames(
        shared_up=("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
        shared_down="mlp.shared_experts.down_proj",
        selection_bias="mlp.gate.e_score_correction_bias",
    )
)
_NORM: Final = dataclasses.replace(RMS_NORM, eps=1e-5)
_DEFAULTS: Final[Mapping[str, Any]] = {
    "max_position_embeddings": 131_072,
    "num_key_value_heads": 8,
    "num_experts_per_tok": 8,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "moe_intermediate_size": 1408,
    "intermediate_size": 10_944,
    "first_k_dense_replace": 1,
    "partial_rotary_factor": 0.5,
}
_SOLAR_DEFAULTS: Final = {
    **_DEFAULTS,
    "moe_intermediate_size": 1280,
    "head_dim": 128,
    "rope_theta": 1e6,
    "partial_rotary_factor": 1.0,
}


def read_config(fields: ConfigFields) -> ModelSpec:
    fields = fields.renamed({}, _DEFAULTS)
    norm = _NORM if fields.boolean("use_qk_norm", False) else None
    return _read(fields, ARCHITECTURE, dense_first_layers(fields), head_norm=norm)


def read_config_solar(fields: ConfigFields) -> ModelSpec:
    """Read a config.json of Solar Open, all of whose layers have experts."""
    return _read(fields.renamed({}, _SOLAR_DEFAULTS), ARCHITECTURE_SOLAR, frozenset())


def _read(
    fields: ConfigFields, architecture: str, dense: frozenset[int], **traits: Any
) -> ModelSpec:
    # transformers 5 may save the number of experts under two names.
    fields = fields.renamed({"num_local_experts": ""}, {})
    inner_size = fields.integer("moe_intermediate_size")
    return read_decoder(
        fields,
        architecture,
        Traits(
            names=without_draft_layers(_NAMES, fields),
            biased=(QKV,) if fields.boolean("attention_bias", False) else (),
            norm=_NORM,
            experts=ExpertTraits(
                routing=read_grouped_routing(fields, RoutingMode.SIGMOID),
                inner_size=inner_size,
                shared_size=inner_size * fields.integer("n_shared_experts"),
                dense_layers=dense,
            ),
            **traits,
        ),
    )
