"""Mistral 4: latent attention of queries that grow with their position, a softmax over experts."""

from collections.abc import Mapping
from typing import Any, Final

from loraplex.core.errors import UnsupportedModelError
from loraplex.kernels.routing_rules import RoutingMode
from loraplex.models.config_fields import ConfigFields
from loraplex.models.families import deepseek
from loraplex.models.latent_config import with_growing_queries
from loraplex.models.spec import ModelSpec

ARCHITECTURE: Final = "Mistral4ForCausalLM"

_DEFAULTS: Final[Mapping[str, Any]] = {
    "vocab_size": 131_072,
    "hidden_size": 4096,
    "intermediate_size": 12_288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "max_position_embeddings": 1_048_576,
    "kv_lora_rank": 256,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 2048,
    "norm_topk_prob": True,
    "eos_token_id": 2,
    "bos_token_id": 1,
    "pad_token_id": 11,
}
_ROPE: Final = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 128.0,
    "original_max_position_embeddings": 8192,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
"""Settings of a file without any."""


def read_config(fields: ConfigFields) -> ModelSpec:
    # transformers 5 may save the number of experts under two names.
    fields = fields.renamed({"num_local_experts": ""}, _DEFAULTS)
    rope = fields.table("rope_scaling") or fields.table("rope_parameters")
    if rope is None:
        fields, rope = fields.with_values({"rope_parameters": _ROPE}), ConfigFields(_ROPE, "")
    num_groups = fields.integer("n_group", 1)
    if num_groups > 1:
        raise UnsupportedModelError(
            f"{fields.source}: n_group {num_groups} is not supported in this architecture; "
            "supported: 1"
        )
    spec = deepseek.read_plain(
        fields, ARCHITECTURE, RoutingMode.SOFTMAX, deepseek.NAMES_2, default_query_rank=1024
    )
    return with_growing_queries(spec, rope.number("llama_4_scaling_beta"))
