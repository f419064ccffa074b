"""Nemotron-H and Nemotron 3: each layer is a state space, attention, or a feed-forward part alone.

The feed-forward parts have no gate. Those of Nemotron 3 have experts, and a shared one.
"""

import dataclasses
from typing import Final

from loraplex.kernels.routing_rules import RoutingMode
from loraplex.models.config_fields import ConfigFields
from loraplex.models.decoder_names import DecoderNames, ExpertNames, StackedExperts
from loraplex.models.expert_config import ExpertTraits, read_grouped_routing
from loraplex.models.family_config import RMS_NORM, Traits, read_decoder, require_switches
from loraplex.models.spec import LayerSpec, ModelSpec, NormPlace
from loraplex.models.specs.attention import OUTPUT, QKV
from loraplex.models.specs.ssm import SSM_INPUT, SSM_OUTPUT
from loraplex.models.ssm_config import with_state_spaces

ARCHITECTURE: Final = "NemotronHForCausalLM"

_EXPERT_UP, _EXPERT_DOWN = (f"mixer.experts.{{expert}}.{part}_proj" for part in ("up", "down"))
_NAMES: Final = DecoderNames(
    root="backbone.",
    other_roots=("model.",),
    embedding="embeddings",
    input_norm="norm",
    feed_forward_norm="norm",
    final_norm="norm_f",
    qkv=("mixer.q_proj", "mixer.k_proj", "mixer.v_proj"),
    o="mixer.o_proj",
    up=("mixer.up_proj",),
    down="mixer.down_proj",
    experts=ExpertNames(
        router="mixer.gate",
        up=(_EXPERT_UP,),
        down=_EXPERT_DOWN,
        latent=("mixer.fc1_latent_proj", "mixer.fc2_latent_proj"),
        shared_up=("mixer.shared_experts.up_proj",),
        shared_down="mixer.shared_experts.down_proj",
        selection_bias="mixer.gate.e_score_correction_bias",
        stacked=(StackedExperts(tensor="mixer.experts.up_proj", parts=(f"{_EXPERT_UP}.weight",)),),
    ),
    ignored=r"mtp\..*",
)
_OWN_NAMES: Final = {
    "hidden_act": "mlp_hidden_act",
    "rms_norm_eps": "layer_norm_epsilon",
    "mamba_n_heads": "mamba_num_heads",
    "mamba_d_head": "mamba_head_dim",
    "mamba_d_state": "ssm_state_size",
    "mamba_n_groups": "n_groups",
    "mamba_d_conv": "conv_kernel",
    "mamba_conv_bias": "use_conv_bias",
    "mamba_proj_bias": "use_bias",
}
_DEFAULTS: Final = {
    "hidden_size": 4096,
    "intermediate_size": 21_504,
    "vocab_size": 131_072,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "hidden_act": "relu2",
    "rms_norm_eps": 1e-5,
    "mamba_n_heads": 128,
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "mamba_n_groups": 8,
    "mamba_d_conv": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "moe_intermediate_size": 7688,
    "moe_shared_expert_intermediate_size": 7688,
}
_STATE, _ATTENTION, _DENSE, _EXPERTS = "mamba", "attention", "mlp", "moe"
_LISTS: Final = ("layers_block_type", "layer_types")
_PATTERN: Final = "hybrid_override_pattern"
_DEFAULT_KINDS: Final = (_STATE, _EXPERTS, _ATTENTION, _DENSE)
_BY_LETTER: Final = {"M": _STATE, "*": _ATTENTION, "-": _DENSE, "E": _EXPERTS}
_BY_NAME: Final = {
    "mamba": _STATE,
    "linear_attention": _STATE,
    "attention": _ATTENTION,
    "full_attention": _ATTENTION,
    "mlp": _DENSE,
    "moe": _EXPERTS,
}


def read_config(fields: ConfigFields) -> ModelSpec:
    kinds = _layer_kinds(fields)
    fields = fields.renamed(_OWN_NAMES, _DEFAULTS)
    fields = fields.with_values(
        {
            "num_hidden_layers": len(kinds),
            # In transformers this is the limit, and time_step_limit is not read.
            "time_step_limit": [fields.number("time_step_min", 0.001), float("inf")],
        }
    )
    require_switches(fields, {"attention_bias": False, "mlp_bias": False})
    dense = frozenset(index for index, kind in enumerate(kinds) if kind != _EXPERTS)
    traits = Traits(
        names=_NAMES,
        norm=dataclasses.replace(RMS_NORM, is_rounded_once=True),
        rotates=(False,),
        is_gated=False,
        experts=_read_experts(fields, dense) if _EXPERTS in kinds else None,
    )
    spec = read_decoder(fields, ARCHITECTURE, traits)
    having_state = frozenset(index for index, kind in enumerate(kinds) if kind == _STATE)
    spec = with_state_spaces(spec, fields, having_state, "mixer", activation="mamba_hidden_act")
    layers = tuple(
        _part_alone(layer, is_mixer=kind in (_STATE, _ATTENTION))
        for layer, kind in zip(spec.layers, kinds, strict=True)
    )
    return dataclasses.replace(spec, layers=layers)


def _layer_kinds(fields: ConfigFields) -> tuple[str, ...]:
    """Read what each layer is. Raises ConfigError or UnsupportedModelError."""
    name, pattern = next(filter(fields.texts, _LISTS), ""), fields.text(_PATTERN, "")
    known, types = _BY_NAME, fields.texts(name) or _DEFAULT_KINDS
    if pattern and not name:
        known, types = _BY_LETTER, tuple(pattern)
    # In transformers these alone count: a number of layers that differs is refused here.
    own = fields.renamed({"layer_types": name or _PATTERN}, {"num_hidden_layers": len(types)})
    own = own.with_values({"layer_types": list(types)})
    return tuple(known[each] for each in own.layer_types(known))


def _read_experts(fields: ConfigFields, dense_layers: frozenset[int]) -> ExpertTraits:
    return ExpertTraits(
        routing=read_grouped_routing(fields, RoutingMode.SIGMOID),
        inner_size=fields.integer("moe_intermediate_size"),
        latent_size=fields.optional_integer("moe_latent_size") or 0,
        shared_size=fields.integer("moe_shared_expert_intermediate_size"),
        dense_layers=dense_layers,
    )


def _part_alone(layer: LayerSpec, *, is_mixer: bool) -> LayerSpec:
    """Return the layer without its feed-forward part, or without its mixer."""
    of_mixer = (QKV, OUTPUT, SSM_INPUT, SSM_OUTPUT)
    place = NormPlace.BEFORE_MIXER if is_mixer else NormPlace.BEFORE_FEED_FORWARD
    return dataclasses.replace(
        layer,
        mixer=layer.mixer if is_mixer else None,
        feed_forward=None if is_mixer else layer.feed_forward,
        norms={place: layer.norms[place]},
        linears={
            name: group for name, group in layer.linears.items() if (name in of_mixer) == is_mixer
        },
    )
