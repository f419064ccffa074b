"""EXAONE 4: norms after parts and of each head; among windows, the other layers do not rotate."""

import dataclasses
from typing import Final

from loraplex.models.config_fields import ConfigFields
from loraplex.models.decoder_names import LLAMA_NAMES
from loraplex.models.family_config import RMS_NORM, Traits, periodic_windows, read_decoder
from loraplex.models.spec import ModelSpec

ARCHITECTURE: Final = "Exaone4ForCausalLM"

_NAMES: Final = dataclasses.replace(
    LLAMA_NAMES,
    input_norm="",
    attention_output_norm="post_attention_layernorm",
    feed_forward_norm="",
    feed_forward_output_norm="post_feedforward_layernorm",
)
_NORM: Final = dataclasses.replace(RMS_NORM, eps=1e-5)
_DEFAULTS: Final = {"max_position_embeddings": 2048, "num_key_value_heads": 32}
_DEFAULT_PERIOD: Final = 4


def read_config(fields: ConfigFields) -> ModelSpec:
    """Read a config.json. Letters in sliding_window_pattern come with layer_types, which counts."""
    fields = fields.renamed({}, _DEFAULTS)
    has_types = "layer_types" in fields
    period = 1 if has_types else fields.integer("sliding_window_pattern", _DEFAULT_PERIOD)
    windows = periodic_windows(fields, period)
    has_windows = fields.positive_or_null("sliding_window", 4096.0) is not None
    traits = Traits(
        names=_NAMES,
        windows=windows,
        rotates=tuple(not has_windows or window is not None for window in windows),
        norm=_NORM,
        head_norm=_NORM,
        rotates_whole_heads=True,
    )
    return read_decoder(fields, ARCHITECTURE, traits)
