"""OPT: learned positions that begin at row 2, biases, norms before the parts or, in 350M, after."""

import dataclasses
from typing import Final

from loraplex.models.config_fields import ConfigFields
from loraplex.models.decoder_names import DecoderNames
from loraplex.models.family_config import (
    ALL_BIASED,
    LAYER_NORM,
    Traits,
    read_decoder,
    require_switches,
)
from loraplex.models.spec import ModelSpec, NormPlace
from loraplex.models.specs.part import NormSpec

ARCHITECTURE: Final = "OPTForCausalLM"

NAMES: Final = DecoderNames(
    root="model.decoder.",
    other_roots=("decoder.",),
    embedding_projections=("project_in", "project_out"),
    positions="embed_positions",
    input_norm="self_attn_layer_norm",
    feed_forward_norm="final_layer_norm",
    final_norm="final_layer_norm",
    o="self_attn.out_proj",
    up=("fc1",),
    down="fc2",
)

_OWN_NAMES: Final = {
    "head_dim": "",
    "num_key_value_heads": "",
    "intermediate_size": "ffn_dim",
    "hidden_act": "activation_function",
    "rms_norm_eps": "",
}
_DEFAULTS: Final = {
    "max_position_embeddings": 2048,
    "hidden_act": "relu",
    "tie_word_embeddings": True,
}
_NEEDED: Final = {"_remove_final_layer_norm": False, "layer_norm_elementwise_affine": True}
_POSITION_OFFSET: Final = 2


def read_config(fields: ConfigFields) -> ModelSpec:
    require_switches(fields, _NEEDED)
    fields = fields.renamed(_OWN_NAMES, _DEFAULTS)
    traits = Traits(
        names=NAMES,
        ropes=(None,),
        biased=ALL_BIASED if fields.boolean("enable_bias", True) else (),
        norm=LAYER_NORM,
        is_gated=False,
    )
    spec = read_decoder(fields, ARCHITECTURE, traits)
    if not fields.boolean("do_layer_norm_before", True):
        spec = _with_norms_after(spec)
    size = fields.integer("word_embed_proj_dim", spec.hidden_size)
    return dataclasses.replace(
        spec,
        embedding_size=None if size == spec.hidden_size else size,
        position_offset=_POSITION_OFFSET,
    )


def _with_norms_after(spec: ModelSpec) -> ModelSpec:
    """Return the model with norms that replace the residual after each part.

    The norm after a layer is the first one of the next layer, or the final one.
    """
    after_layer: NormSpec | None = None
    layers = []
    for layer in spec.layers:
        norms = {NormPlace.BEFORE_FEED_FORWARD: _after(layer.norms[NormPlace.BEFORE_MIXER])}
        if after_layer is not None:
            norms[NormPlace.BEFORE_MIXER] = after_layer
        after_layer = _after(layer.norms[NormPlace.BEFORE_FEED_FORWARD])
        layers.append(dataclasses.replace(layer, norms=norms))
    assert after_layer is not None
    return dataclasses.replace(spec, layers=tuple(layers), final_norm=after_layer)


def _after(norm: NormSpec) -> NormSpec:
    return dataclasses.replace(norm, replaces_residual=True)
