"""Cohere's Command R: a layer norm without bias, parts beside each other, scaled logits.

In Cohere 2 only the layers with a window rotate.
"""

import dataclasses
from typing import Final

from loraplex.models.config_fields import ConfigFields
from loraplex.models.decoder_names import DecoderNames
from loraplex.models.family_config import Traits, read_decoder, sliding_layers
from loraplex.models.spec import OUTPUT, QKV, ModelSpec, NormKind, NormSpec

ARCHITECTURE: Final = "CohereForCausalLM"
ARCHITECTURE_2: Final = "Cohere2ForCausalLM"

NAMES: Final = DecoderNames(feed_forward_norm="")

_NORM: Final = NormSpec("", 0, 1e-5, NormKind.LAYER, is_rounded_once=True)
_OWN_NAMES: Final = {"rms_norm_eps": "layer_norm_eps"}
_DEFAULTS: Final = {"max_position_embeddings": 8192, "tie_word_embeddings": True}
_DEFAULT_THETA: Final = 500_000.0
_DEFAULT_WINDOW: Final = 4096
_DEFAULT_PERIOD: Final = 4


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
    fields = fields.renamed({**_OWN_NAMES, "head_dim": ""}, _DEFAULTS)
    period = fields.integer("sliding_window_pattern", _DEFAULT_PERIOD)
    numbers = range(1, fields.integer("num_hidden_layers") + 1)
    is_sliding = sliding_layers(fields, [number % period != 0 for number in numbers])
    window = fields.integer("sliding_window", _DEFAULT_WINDOW)
    traits = dataclasses.replace(
        _traits(fields),
        windows=tuple(window if slides else None for slides in is_sliding),
        rotates=is_sliding,
    )
    return _read(fields, ARCHITECTURE_2, traits)


def _traits(fields: ConfigFields) -> Traits:
    return Traits(
        names=NAMES,
        is_rope_interleaved=True,
        biased=(QKV, OUTPUT) if fields.boolean("attention_bias", False) else (),
        norm=_NORM,
        is_parallel=True,
    )


def _read(fields: ConfigFields, architecture: str, traits: Traits) -> ModelSpec:
    spec = read_decoder(fields, architecture, traits)
    return dataclasses.replace(spec, logits_factor=fields.number("logit_scale", 0.0625))
