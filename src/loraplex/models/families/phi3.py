"""Phi 3 and 4: q, k and v in one projection, gate and up in another; longrope of half a head."""

import dataclasses
from typing import Final

from loraplex.core.errors import UnsupportedModelError
from loraplex.models.config_fields import ConfigFields
from loraplex.models.decoder_names import LLAMA_NAMES
from loraplex.models.family_config import Traits, read_decoder, require_switches
from loraplex.models.spec import ModelSpec

ARCHITECTURE: Final = "Phi3ForCausalLM"

_NAMES: Final = dataclasses.replace(
    LLAMA_NAMES, qkv=("self_attn.qkv_proj",), up=("mlp.gate_up_proj",)
)
_DEFAULTS: Final = {"max_position_embeddings": 4096, "original_max_position_embeddings": 4096}
_NEEDED: Final = {"attention_bias": False, "mlp_bias": False, "lm_head_bias": False}
"""Fields whose other values are not supported."""
_LONGROPE: Final = ("longrope", "su", "yarn")
"""Types that all mean longrope here: older files have the last two."""


def read_config(fields: ConfigFields) -> ModelSpec:
    require_switches(fields, _NEEDED)
    fields = _with_longrope(fields.renamed({}, {**_DEFAULTS, "rms_norm_eps": 1e-5}))
    window = fields.optional_integer("sliding_window")
    return read_decoder(fields, ARCHITECTURE, Traits(names=_NAMES, windows=(window,)))


def _with_longrope(fields: ConfigFields) -> ConfigFields:
    for name in ("rope_scaling", "rope_parameters"):
        rope = fields.table(name)
        if rope is None:
            continue
        rope_type = rope.text("rope_type", rope.text("type", "default"))
        if rope_type not in ("default", *_LONGROPE):
            raise UnsupportedModelError(
                f"{rope.source}: rope type {rope_type!r} is not supported in a Phi 3; "
                f"supported: default, {', '.join(_LONGROPE)}"
            )
        if rope_type != "default":
            fields = fields.with_values({name: {**rope.values, "rope_type": "longrope"}})
    return fields
