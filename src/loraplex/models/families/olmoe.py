"""OLMoE: experts in every layer, and norms of all query and all key heads together."""

from typing import Final

from loraplex.core.errors import UnsupportedModelError
from loraplex.kernels.routing_rules import RoutingMode
from loraplex.models.config_fields import ConfigFields
from loraplex.models.expert_config import ExpertTraits, read_routing
from loraplex.models.family_config import RMS_NORM, Traits, read_decoder
from loraplex.models.spec import ModelSpec
from loraplex.models.specs.attention import OUTPUT, QKV

ARCHITECTURE: Final = "OlmoeForCausalLM"
_DEFAULTS: Final = {
    "max_position_embeddings": 4096,
    "num_experts_per_tok": 8,
    "rms_norm_eps": 1e-5,
}


def read_config(fields: ConfigFields) -> ModelSpec:
    fields = fields.renamed({}, _DEFAULTS)
    clip = fields.optional_number("clip_qkv")
    if clip is not None:
        raise UnsupportedModelError(
            f"{fields.source}: clip_qkv {clip:g} is not supported: q, k and v are not clipped"
        )
    routing = read_routing(
        fields,
        RoutingMode.SOFTMAX,
        default_num_experts=64,
        normalizes=fields.boolean("norm_topk_prob", False),
    )
    traits = Traits(
        rotates_whole_heads=True,
        biased=(QKV, OUTPUT) if fields.boolean("attention_bias", False) else (),
        head_norm=RMS_NORM,
        normalizes_heads_together=True,
        experts=ExpertTraits(routing=routing),
    )
    return read_decoder(fields, ARCHITECTURE, traits)
