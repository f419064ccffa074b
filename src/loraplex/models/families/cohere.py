"""Cohere's Command R: a layer norm without bias, parallel parts, scaled logits.

In Cohere 2 only the layers with a window rotate.
"""

import dataclasses
from typing import Final

from loraplex.models.config_fields import ConfigFields
from loraplex.models.decoder_names import DecoderNames
from loraplex.models.family_config import Traits, periodic_windows, read_decoder
from loraplex.models.spec import ModelSpec
from loraplex.models.specs.attention import OUTPUT, QKV
from loraplex.models.specs.part import NormKind, NormSpec

ARCHITECTURE: Final = "CohereForCausalLM"
ARCHITECTURE_2: Final = "Cohere2ForCausalLM"

NAMES: Final = DecoderNames(feed_forward_norm="")

_NORM: Final = NormSpec("", 0, 1e-5, NormKind.LAYER, is_rounded_once=True)
_OWN_NAMES: Final = {"rms_norm_eps": "layer_norm_eps"}
_DEFAULTS: Final = {"max_position_embeddings": 8192, "tie_word_embeddings": True}
_DEFAULT_THETA: Final = 500_000.0


def read_config(fields: ConfigFields) -> ModelSpec:
    """Read a config.json of Command R and R+."""
    fields = fields.renamed(_OWN_NAMES, {**_DEFAULTS, "rope_theta": _DEFAULT_THETA})
    traits = dataclasses.replace(
        _traits(fields),
        head_norm=_NORM if fields.boolean("use_qk_norm", False) else None,
        has_weights_per_head=True,
    )
    return _read(fields, ARCHITECTURE, traits)


def read_config_2(fields: ConfigFields) -> ModelSpec:
    """Read a config.json of Command R7B and A: every fourth layer has no window by default."""
    fields = fields.renamed(_OWN_NAMES, _DEFAULTS)
    windows = periodic_windows(fields, fields.integer("sliding_window_pattern", 4))
    rotates = tuple(window is not None for window in windows)
    traits = dataclasses.replace(_traits(fields), windows=windows, rotates=rotates)
    return _read(fields, ARCHITECTURE_2, traits)


def _traits(fields: ConfigFields) -> Traits:
    return Traits(
        names=NAMES,
        is_rope_interleaved=True,
        rotates_whole_heads=True,
        biased=(QKV, OUTPUT) if fields.boolean("attention_bias", False) else (),
        norm=_NORM,
        is_parallel=True,
    )


def _read(fields: ConfigFields, architecture: str, traits: Traits) -> ModelSpec:
    spec = read_decoder(fields, architecture, traits)
    return dataclasses.replace(spec, logits_factor=fields.number("logit_scale", 0.0625))
