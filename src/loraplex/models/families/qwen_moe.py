"""Qwen 2 and 3 MoE: experts in some layers; in those of Qwen 2 also a shared one for all tokens."""

import dataclasses
from typing import Final

from loraplex.kernels.routing_rules import RoutingMode
from loraplex.models.config_fields import ConfigFields
from loraplex.models.decoder_names import DecoderNames, ExpertNames
from loraplex.models.expert_config import ExpertTraits, read_routing
from loraplex.models.family_config import RMS_NORM, Traits, read_decoder, windows_by_switch
from loraplex.models.spec import ModelSpec
from loraplex.models.specs.attention import OUTPUT, QKV

ARCHITECTURE_2: Final = "Qwen2MoeForCausalLM"
ARCHITECTURE_3: Final = "Qwen3MoeForCausalLM"

_SHARED_NAMES: Final = DecoderNames(
    experts=ExpertNames(
        shared_up=("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
        shared_down="mlp.shared_expert.down_proj",
        shared_gate="mlp.shared_expert_gate",
    )
)
_DEFAULTS_2: Final = {
    "max_position_embeddings": 32_768,
    "num_key_value_heads": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632,
}
_DEFAULTS_3: Final = {
    "max_position_embeddings": 32_768,
    "num_key_value_heads": 4,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "max_window_layers": 0,
}


def read_config_2(fields: ConfigFields) -> ModelSpec:
    fields = fields.renamed({}, _DEFAULTS_2)
    experts = _read_experts(fields, default_num_experts=60)
    traits = Traits(
        names=_SHARED_NAMES,
        windows=windows_by_switch(fields, lambda index, limit: index % 2 == 0 and index < limit),
        rotates_whole_heads=True,
        biased=(QKV,) if fields.boolean("qkv_bias", True) else (),
        experts=dataclasses.replace(
            experts, shared_size=fields.integer("shared_expert_intermediate_size")
        ),
    )
    return read_decoder(fields, ARCHITECTURE_2, traits)


def read_config_3(fields: ConfigFields) -> ModelSpec:
    # In transformers this class reads neither field: the switch is for all layers.
    fields = fields.renamed({"layer_types": "", "max_window_layers": ""}, _DEFAULTS_3)
    traits = Traits(
        windows=windows_by_switch(fields),
        rotates_whole_heads=True,
        biased=(QKV, OUTPUT) if fields.boolean("attention_bias", False) else (),
        head_norm=RMS_NORM,
        experts=_read_experts(fields, default_num_experts=128),
    )
    return read_decoder(fields, ARCHITECTURE_3, traits)


def _read_experts(fields: ConfigFields, *, default_num_experts: int) -> ExpertTraits:
    """Read what both have: a layer is dense if it is listed, or if the step leaves it out."""
    step = fields.integer("decoder_sparse_step", 1)
    dense = frozenset(fields.integers("mlp_only_layers"))
    layers = range(fields.num_layers)
    routing = read_routing(
        fields,
        RoutingMode.SOFTMAX,
        default_num_experts=default_num_experts,
        normalizes=fields.boolean("norm_topk_prob", False),
    )
    return ExpertTraits(
        routing=routing,
        inner_size=fields.integer("moe_intermediate_size"),
        dense_layers=frozenset(i for i in layers if i in dense or (i + 1) % step),
    )
