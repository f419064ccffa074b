"""Language models of Qwen 2.5 VL and Qwen 3 VL: Qwen 2.5 and Qwen 3 with other defaults.

Their three-dimensional positions are equal in a text, so mrope is the plain rotary embedding.
"""

from typing import Final

from loraplex.models.config_fields import ConfigFields
from loraplex.models.families import qwen2, qwen3
from loraplex.models.family_config import read_text_tower
from loraplex.models.spec import ModelSpec

ARCHITECTURE_2_5: Final = "Qwen2_5_VLForConditionalGeneration"
ARCHITECTURE_3: Final = "Qwen3VLForConditionalGeneration"

_DEFAULTS_2_5: Final = {
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1_000_000.0,
    "max_window_layers": 80,
    "sliding_window": 4096,
}
_DEFAULTS_3: Final = {
    "num_key_value_heads": 32,
    "max_position_embeddings": 128_000,
    "rope_theta": 500_000.0,
}


def read_config_2_5(fields: ConfigFields) -> ModelSpec:
    """Read the wrapper. Older ones have the language model's fields among their own."""
    if "text_config" not in fields:
        fields = fields.with_values({"text_config": dict(fields.values)})
    text = fields.table("text_config")
    if text is not None and text.boolean("tie_word_embeddings", False):
        fields = fields.with_values({"tie_word_embeddings": True})
    return read_text_tower(
        fields,
        ARCHITECTURE_2_5,
        lambda text: qwen2.read_config(_without_mrope(text.renamed({}, _DEFAULTS_2_5))),
        ties=False,
    )


def read_config_3(fields: ConfigFields) -> ModelSpec:
    return read_text_tower(
        fields,
        ARCHITECTURE_3,
        lambda text: qwen3.read_config(_without_mrope(text.renamed({}, _DEFAULTS_3))),
        ties=False,
    )


def _without_mrope(fields: ConfigFields) -> ConfigFields:
    for name in ("rope_scaling", "rope_parameters"):
        rope = fields.table(name)
        if rope is not None and rope.text("rope_type", rope.text("type", "")) == "mrope":
            fields = fields.with_values({name: {**rope.values, "rope_type": "default"}})
    return fields
