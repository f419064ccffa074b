"""DeepSeek V2, V3 and V3.2: latent attention, and experts in groups with shared ones.

R1, Kimi K2 and Moonlight are V3; Kimi K2.5 is V3 within a multimodal wrapper. GLM 4.7 Flash and GLM
5 differ in sizes and in what they call layers without experts. V3.2 and GLM 5 choose the positions
that a query sees: all of them up to a length, which is the longest that is served.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

from loraplex.kernels.routing_rules import RoutingMode
from loraplex.models.config_fields import ConfigFields
from loraplex.models.decoder_names import DecoderNames, ExpertNames
from loraplex.models.expert_config import ExpertTraits, dense_first_layers, read_grouped_routing
from loraplex.models.family_config import Traits, read_text_tower, require_switches
from loraplex.models.latent_config import limited_to, read_latent_decoder, without_draft_layers
from loraplex.models.spec import ModelSpec

ARCHITECTURE_2: Final = "DeepseekV2ForCausalLM"
ARCHITECTURE_3: Final = "DeepseekV3ForCausalLM"
ARCHITECTURE_3_2: Final = "DeepseekV32ForCausalLM"
ARCHITECTURE_GLM_FLASH: Final = "Glm4MoeLiteForCausalLM"
ARCHITECTURE_GLM_5: Final = "GlmMoeDsaForCausalLM"
WRAPPER_KIMI: Final = "KimiK25ForConditionalGeneration"
WRAPPER_KIMI_SAVED: Final = "Kimi_K25ForConditionalGeneration"
"""Name in folders that transformers 5 saved."""

_EXPERTS: Final = ExpertNames(
    shared_up=("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
    shared_down="mlp.shared_experts.down_proj",
)
NAMES_2: Final = DecoderNames(experts=_EXPERTS)
_NAMES: Final = DecoderNames(
    experts=dataclasses.replace(_EXPERTS, selection_bias="mlp.gate.e_score_correction_bias")
)
_DEFAULTS_2: Final[Mapping[str, Any]] = {
    "vocab_size": 102_400,
    "hidden_size": 4096,
    "intermediate_size": 11_008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "moe_intermediate_size": 1407,
    "eos_token_id": 2,
    "bos_token_id": 1,
}
_DEFAULTS_3: Final[Mapping[str, Any]] = {
    "vocab_size": 129_280,
    "hidden_size": 7168,
    "intermediate_size": 18_432,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "max_position_embeddings": 4096,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "n_group": 8,
    "topk_group": 4,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 3,
    "norm_topk_prob": True,
    "eos_token_id": 1,
    "bos_token_id": 0,
}
_DEFAULTS_GLM_FLASH: Final[Mapping[str, Any]] = {
    **_DEFAULTS_3,
    "vocab_size": 154_880,
    "hidden_size": 2048,
    "intermediate_size": 10_240,
    "num_hidden_layers": 47,
    "num_attention_heads": 20,
    "max_position_embeddings": 202_752,
    "rms_norm_eps": 1e-5,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "n_routed_experts": 64,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1536,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.8,
    "first_k_dense_replace": 1,
}
_DEFAULTS_GLM_5: Final[Mapping[str, Any]] = {
    **_DEFAULTS_GLM_FLASH,
    "hidden_size": 6144,
    "intermediate_size": 12_288,
    "num_hidden_layers": 78,
    "num_attention_heads": 64,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 3,
}
_DEFAULT_QUERY_RANK: Final = 1536
_NUM_SEEN: Final = 2048
"""Default of index_topk."""
_INDEXER: Final = r"(.*\.)?self_attn\.indexer\..*"
"""Tensors that choose the positions."""
_GREEDY: Final = "greedy"
_IN_GROUPS: Final = "group_limited_greedy"


def read_config_2(fields: ConfigFields) -> ModelSpec:
    fields = fields.renamed({}, _DEFAULTS_2)
    method = fields.text("topk_method", _GREEDY)
    if method == _GREEDY:
        fields = fields.with_values({"n_group": 1, "topk_group": 1})
    else:
        require_switches(fields, {"topk_method": _IN_GROUPS})
    require_switches(fields, {"norm_topk_prob": False, "scoring_func": "softmax"})
    traits = Traits(
        names=NAMES_2,
        is_rope_interleaved=True,
        experts=_read_experts(fields, RoutingMode.SOFTMAX),
    )
    return read_latent_decoder(
        fields, ARCHITECTURE_2, traits, default_query_rank=_DEFAULT_QUERY_RANK
    )


def read_config_3(fields: ConfigFields) -> ModelSpec:
    fields = fields.renamed({}, _DEFAULTS_3)
    return _read_third(fields, ARCHITECTURE_3, default_query_rank=_DEFAULT_QUERY_RANK)


def read_config_3_2(fields: ConfigFields) -> ModelSpec:
    fields = fields.renamed({}, {**_DEFAULTS_3, "max_position_embeddings": 163_840})
    spec = _read_third(fields, ARCHITECTURE_3_2, default_query_rank=_DEFAULT_QUERY_RANK)
    return _up_to_the_choice(spec, fields)


def read_config_glm_flash(fields: ConfigFields) -> ModelSpec:
    fields = fields.renamed({}, _DEFAULTS_GLM_FLASH)
    return _read_third(fields, ARCHITECTURE_GLM_FLASH, default_query_rank=768)


def read_config_glm_5(fields: ConfigFields) -> ModelSpec:
    fields = fields.renamed({}, _DEFAULTS_GLM_5)
    spec = _read_third(fields, ARCHITECTURE_GLM_5, default_query_rank=2048)
    return _up_to_the_choice(spec, fields)


def read_wrapper_kimi(fields: ConfigFields) -> ModelSpec:
    spec = read_text_tower(fields, WRAPPER_KIMI, read_config_3, ties=False)
    ignored = rf"{spec.names.ignored}|(model\.)?mm_projector\..*"
    # What transformers 5 saves has the language model's layers under the tower's name for its own.
    other_names = {**spec.names.other_names, "blocks": spec.names.layers}
    names = dataclasses.replace(spec.names, ignored=ignored, other_names=other_names)
    return dataclasses.replace(spec, names=names)


def _up_to_the_choice(spec: ModelSpec, fields: ConfigFields) -> ModelSpec:
    """Return the model for lengths at which each query sees all positions before it."""
    number = fields.integer("index_topk", _NUM_SEEN)
    names = dataclasses.replace(spec.names, ignored=rf"{spec.names.ignored}|{_INDEXER}")
    reason = (
        f"beyond index_topk ({number}) positions its attention is sparse, which is not supported"
    )
    return limited_to(dataclasses.replace(spec, names=names), number, reason)


def _read_third(fields: ConfigFields, architecture: str, *, default_query_rank: int) -> ModelSpec:
    """Read what is built like V3, given its defaults."""
    require_switches(fields, {"scoring_func": "sigmoid", "topk_method": "noaux_tc"})
    names = without_draft_layers(_NAMES, fields)
    return read_plain(
        fields, architecture, RoutingMode.SIGMOID, names, default_query_rank=default_query_rank
    )


def read_plain(
    fields: ConfigFields,
    architecture: str,
    mode: RoutingMode,
    names: DecoderNames,
    *,
    default_query_rank: int,
) -> ModelSpec:
    """Read latent attention with experts that this mode chooses, given all other defaults."""
    traits = Traits(
        names=names,
        is_rope_interleaved=fields.boolean("rope_interleave", True),
        experts=_read_experts(fields, mode),
    )
    return read_latent_decoder(fields, architecture, traits, default_query_rank=default_query_rank)


def _read_experts(fields: ConfigFields, mode: RoutingMode) -> ExpertTraits:
    """Read experts in groups, with shared ones that are one of their joined size."""
    inner_size = fields.integer("moe_intermediate_size")
    return ExpertTraits(
        routing=read_grouped_routing(fields, mode),
        inner_size=inner_size,
        shared_size=inner_size * fields.integer("n_shared_experts"),
        dense_layers=dense_first_layers(fields),
    )
