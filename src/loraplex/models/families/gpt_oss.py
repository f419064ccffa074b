"""GPT-OSS: experts with biases and a clamped gate, every other layer with a window, sink logits."""

import dataclasses
from typing import Final

from loraplex.core.errors import UnsupportedModelError
from loraplex.kernels.activations import Activation
from loraplex.kernels.routing_rules import RoutingMode
from loraplex.models.config_fields import ConfigFields
from loraplex.models.decoder_names import DecoderNames, ExpertNames, StackedExperts
from loraplex.models.expert_config import ExpertTraits, read_routing
from loraplex.models.family_config import RMS_NORM, Traits, periodic_windows, read_decoder
from loraplex.models.spec import DOWN, ROUTER, UP, ModelSpec
from loraplex.models.specs.attention import OUTPUT, QKV, AttentionSpec

ARCHITECTURE: Final = "GptOssForCausalLM"

_GATE, _UP, _DOWN = (f"mlp.experts.{{expert}}.{part}_proj" for part in ("gate", "up", "down"))
_STACKED: Final = (
    StackedExperts(
        tensor="mlp.experts.gate_up_proj",
        parts=(f"{_GATE}.weight", f"{_UP}.weight"),
        is_transposed=True,
        is_interleaved=True,
    ),
    StackedExperts(
        tensor="mlp.experts.gate_up_proj_bias",
        parts=(f"{_GATE}.bias", f"{_UP}.bias"),
        is_interleaved=True,
    ),
    StackedExperts(tensor="mlp.experts.down_proj", parts=(f"{_DOWN}.weight",), is_transposed=True),
    StackedExperts(tensor="mlp.experts.down_proj_bias", parts=(f"{_DOWN}.bias",)),
)
_NAMES: Final = DecoderNames(
    experts=ExpertNames(router="mlp.router", up=(_GATE, _UP), down=_DOWN, stacked=_STACKED)
)
_SINKS: Final = "self_attn.sinks"
_ALWAYS_BIASED: Final = (ROUTER, UP, DOWN)
_DEFAULTS: Final = {
    "head_dim": 64,
    "num_key_value_heads": 8,
    "sliding_window": 128,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150_000.0,
    "rope_parameters": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
    "num_experts_per_tok": 4,
}
_CLAMPED_SWIGLU: Final = {"swiglu_limit": 7.0, "swiglu_alpha": 1.702}
"""Fields of the gate, with the only values that the kernels have."""


def read_config(fields: ConfigFields) -> ModelSpec:
    fields = fields.renamed({}, _DEFAULTS)
    _require_known_gate(fields)
    routing = read_routing(fields, RoutingMode.CHOSEN_SOFTMAX, default_num_experts=128)
    traits = Traits(
        names=_NAMES,
        windows=periodic_windows(fields, 2),
        rotates_whole_heads=True,
        biased=_ALWAYS_BIASED + ((QKV, OUTPUT) if fields.boolean("attention_bias", True) else ()),
        norm=dataclasses.replace(RMS_NORM, is_rounded_once=True),
        experts=ExpertTraits(routing=routing, activation=Activation.CLAMPED_SWIGLU),
    )
    spec = read_decoder(fields, ARCHITECTURE, traits)
    return spec.map_mixers(AttentionSpec, _with_sinks)


def _with_sinks(attention: AttentionSpec, layer: int) -> AttentionSpec:
    return dataclasses.replace(attention, sink_logits=_NAMES.layer(layer) + _SINKS)


def _require_known_gate(fields: ConfigFields) -> None:
    for name, supported in _CLAMPED_SWIGLU.items():
        value = fields.number(name, supported)
        if value != supported:
            raise UnsupportedModelError(
                f"{fields.source}: {name} {value:g} is not supported; supported: {supported}"
            )
