"""Mistral 3: Ministral 3, whose queries grow with their position, and the multimodal wrapper, in
which Mistral 4 is as well.
"""

import dataclasses
from typing import Final

from loraplex.core.errors import UnsupportedModelError
from loraplex.models.config_fields import ConfigFields
from loraplex.models.families import mistral, mistral4
from loraplex.models.family_config import read_text_tower
from loraplex.models.spec import ModelSpec
from loraplex.models.specs.attention import AttentionSpec

ARCHITECTURE: Final = "Ministral3ForCausalLM"
WRAPPER: Final = "Mistral3ForConditionalGeneration"

_DEFAULTS: Final = {
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 262_144,
    "rms_norm_eps": 1e-5,
}
_ROPE: Final = {
    "rope_type": "yarn",
    "rope_theta": 1_000_000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16_384,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
"""Settings of a file without any."""


def read_config(fields: ConfigFields) -> ModelSpec:
    """Read a Ministral 3."""
    fields = fields.renamed({}, _DEFAULTS)
    rope = fields.table("rope_scaling") or fields.table("rope_parameters")
    if rope is None:
        fields = fields.with_values({"rope_parameters": _ROPE})
    growth = (rope or ConfigFields(_ROPE, fields.source)).number("llama_4_scaling_beta")

    def with_growth(attention: AttentionSpec, _layer: int) -> AttentionSpec:
        assert attention.rope is not None
        query_rope = dataclasses.replace(attention.rope, growth=growth)
        return dataclasses.replace(attention, query_rope=query_rope)

    spec = mistral.read_config(fields).map_mixers(AttentionSpec, with_growth)
    return dataclasses.replace(spec, architecture=ARCHITECTURE)


def read_wrapper(fields: ConfigFields) -> ModelSpec:
    return read_text_tower(fields, WRAPPER, _read_text, ties=True)


def _read_text(fields: ConfigFields) -> ModelSpec:
    model_type = fields.text("model_type", "mistral")
    read = _READERS.get(model_type)
    if read is None:
        raise UnsupportedModelError(
            f"{fields.source}: model_type {model_type!r} is not supported; "
            f"supported: {', '.join(_READERS)}"
        )
    return read(fields)


_READERS: Final = {
    "mistral": mistral.read_config,
    "ministral3": read_config,
    "mistral4": mistral4.read_config,
}
"""Readers of the wrapper's language model by its model_type."""
