"""Mixtral: Mistral with experts, whose weights are always divided by their sum."""

from typing import Final

from loraplex.kernels.routing_rules import RoutingMode
from loraplex.models.config_fields import ConfigFields
from loraplex.models.decoder_names import DecoderNames, ExpertNames
from loraplex.models.expert_config import ExpertTraits, read_routing
from loraplex.models.family_config import Traits, read_decoder
from loraplex.models.spec import ModelSpec

ARCHITECTURE: Final = "MixtralForCausalLM"
NAMES: Final = DecoderNames(
    experts=ExpertNames(
        router="block_sparse_moe.gate",
        up=("block_sparse_moe.experts.{expert}.w1", "block_sparse_moe.experts.{expert}.w3"),
        down="block_sparse_moe.experts.{expert}.w2",
    ),
    other_parts={"mlp.": "block_sparse_moe."},
)


def read_config(fields: ConfigFields) -> ModelSpec:
    defaults = {
        "max_position_embeddings": 131_072,
        "num_key_value_heads": 8,
        "num_experts_per_tok": 2,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
    }
    fields = fields.renamed({}, defaults)
    window = fields.positive_or_null("sliding_window", None)
    routing = read_routing(
        fields,
        RoutingMode.SOFTMAX,
        default_num_experts=8,
        normalizes=True,
    )
    traits = Traits(
        names=NAMES,
        windows=(None if window is None else int(window),),
        rotates_whole_heads=True,
        experts=ExpertTraits(routing=routing),
    )
    return read_decoder(fields, ARCHITECTURE, traits)
