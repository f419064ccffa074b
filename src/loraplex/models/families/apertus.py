"""Apertus: Llama with norms of heads, without a gate, and with an activation that is learned."""

import dataclasses
from typing import Final

from loraplex.kernels.activations import Activation
from loraplex.models.config_fields import ConfigFields
from loraplex.models.decoder_names import LLAMA_NAMES
from loraplex.models.family_config import RMS_NORM, Traits, read_decoder, require_switches
from loraplex.models.spec import LayerSpec, ModelSpec
from loraplex.models.specs.attention import OUTPUT, QKV

ARCHITECTURE: Final = "ApertusForCausalLM"

_ACTIVATION: Final = "mlp.act_fn"
_NAMES: Final = dataclasses.replace(
    LLAMA_NAMES,
    input_norm="attention_layernorm",
    feed_forward_norm="feedforward_layernorm",
    up=("mlp.up_proj",),
    # Constants of xIELU, which checkpoints repeat.
    ignored=rf"{LLAMA_NAMES.ignored}|.*\.act_fn\.(beta|eps)",
)
_NORM: Final = dataclasses.replace(RMS_NORM, eps=1e-5)
_DEFAULTS: Final = {"max_position_embeddings": 65_536, "rope_theta": 12e6}
_ROPE: Final = {
    "rope_type": "llama3",
    "rope_theta": 12e6,
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
"""Settings of a file without any."""


def read_config(fields: ConfigFields) -> ModelSpec:
    fields = fields.renamed({}, _DEFAULTS)
    require_switches(fields, {"hidden_act": "xielu"})
    if fields.table("rope_scaling") is None and fields.table("rope_parameters") is None:
        fields = fields.with_values({"rope_parameters": _ROPE})
    traits = Traits(
        names=_NAMES,
        biased=(QKV, OUTPUT) if fields.boolean("attention_bias", False) else (),
        norm=_NORM,
        head_norm=_NORM,
        activation=Activation.RELU,  # replaced below
        is_gated=False,
        rotates_whole_heads=True,
    )
    spec = read_decoder(fields, ARCHITECTURE, traits)
    layers = (_with_xielu(layer, index) for index, layer in enumerate(spec.layers))
    return dataclasses.replace(spec, layers=tuple(layers), hidden_act="xielu")


def _with_xielu(layer: LayerSpec, index: int) -> LayerSpec:
    assert layer.feed_forward is not None
    path = _NAMES.layer(index) + _ACTIVATION
    return dataclasses.replace(
        layer, feed_forward=dataclasses.replace(layer.feed_forward, xielu=path)
    )
