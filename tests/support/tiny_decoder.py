"""Specification of a small decoder, for tests that need sizes and no weights."""

from typing import Any, Final

from loraplex.models.config_fields import ConfigFields
from loraplex.models.registry import ARCHITECTURES
from loraplex.models.spec import ModelSpec

_FIELDS: Final = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "vocab_size": 100,
    "max_position_embeddings": 100,
    "dtype": "bfloat16",
}


def tiny_spec(architecture: str = "LlamaForCausalLM", **changes: Any) -> ModelSpec:
    """changes: fields of config.json."""
    return ARCHITECTURES[architecture](ConfigFields(_FIELDS | changes, "config.json"))


TINY_DECODER: Final = tiny_spec()
