"""Language model within a multimodal wrapper: its fields, and its tensors among the others."""

import dataclasses
from collections.abc import Callable
from typing import Final

from loraplex.core.errors import ConfigError
from loraplex.models.config_fields import ConfigFields
from loraplex.models.family_config import refuse_fields
from loraplex.models.spec import ModelSpec

_SHARED: Final = ("dtype", "torch_dtype", "eos_token_id", "bos_token_id", "pad_token_id")
"""Fields of the wrapper that count where text_config lacks them."""


def read_text_tower(
    fields: ConfigFields,
    architecture: str,
    read: Callable[[ConfigFields], ModelSpec],
    *,
    ties: bool,
) -> ModelSpec:
    """Read text_config by the family's reader. Raises ConfigError or UnsupportedModelError.

    ties: whether the head is the embedding in a wrapper that does not state it.
    """
    spec = read(language_model_fields(fields, ties=ties))
    names = dataclasses.replace(
        spec.names,
        other_roots=("language_model.model.", "model.language_model.", "language_model."),
        ignored=rf"{spec.names.ignored}|(model\.)?(visual|vision_tower|multi_modal_projector)\..*",
    )
    return dataclasses.replace(spec, architecture=architecture, names=names)


def language_model_fields(fields: ConfigFields, *, ties: bool) -> ConfigFields:
    """Return text_config as the config.json of a language model alone. Raises ConfigError."""
    refuse_fields(fields)
    text = fields.table("text_config")
    if text is None:
        raise ConfigError(f"{fields.source}: text_config is missing")
    shared = {name: fields.values[name] for name in _SHARED if name in fields}
    is_tied = fields.boolean("tie_word_embeddings", ties)
    return text.renamed({}, shared).with_values({"tie_word_embeddings": is_tied})
