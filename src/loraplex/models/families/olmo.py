"""OLMo 2 and 3: norms after the parts only, and of all query and all key heads together.

OLMo 3 adds windows, and a rotary embedding of its own for the layers without one.
"""

import dataclasses
from typing import Final

from loraplex.models.config_fields import ConfigFields
from loraplex.models.decoder_names import LLAMA_NAMES
from loraplex.models.family_config import Traits, periodic_windows, read_decoder, ropes_of_windows
from loraplex.models.spec import ModelSpec
from loraplex.models.specs.attention import OUTPUT, QKV
from loraplex.models.specs.part import NormSpec

ARCHITECTURE_2: Final = "Olmo2ForCausalLM"
ARCHITECTURE_3: Final = "Olmo3ForCausalLM"

_NORM: Final = NormSpec("", 0, 1e-5, is_rounded_once=True)
_NAMES: Final = dataclasses.replace(
    LLAMA_NAMES,
    input_norm="",
    attention_output_norm="post_attention_layernorm",
    feed_forward_norm="",
    feed_forward_output_norm="post_feedforward_layernorm",
)
_THETA_3: Final = 500_000.0
_FULL_PERIOD: Final = 4


def read_config_2(fields: ConfigFields) -> ModelSpec:
    fields = fields.renamed({}, {"max_position_embeddings": 2048})
    return read_decoder(fields, ARCHITECTURE_2, _traits(fields))


def read_config_3(fields: ConfigFields) -> ModelSpec:
    """Read an OLMo 3. An older file's rope_theta is of the layers without a window."""
    defaults = {"max_position_embeddings": 2048, "rope_theta": _THETA_3}
    fields = fields.renamed({}, defaults)
    windows = periodic_windows(fields, _FULL_PERIOD)
    ropes = ropes_of_windows(fields, windows, _THETA_3)
    traits = dataclasses.replace(_traits(fields), windows=windows, ropes=ropes)
    return read_decoder(fields, ARCHITECTURE_3, traits)


def _traits(fields: ConfigFields) -> Traits:
    return Traits(
        rotates_whole_heads=True,
        names=_NAMES,
        norm=_NORM,
        head_norm=_NORM,
        normalizes_heads_together=True,
        biased=(QKV, OUTPUT) if fields.boolean("attention_bias", False) else (),
    )
