"""Qwen 2 and 2.5: a bias on q, k and v; the upper layers may have a sliding window."""

from loraplex.models.config_fields import ConfigFields
from loraplex.models.family_config import LlamaTraits, read_llama_like, windows_by_layer_type
from loraplex.models.spec import QKV, ModelSpec

ARCHITECTURE = "Qwen2ForCausalLM"


def read_config(fields: ConfigFields) -> ModelSpec:
    traits = LlamaTraits(
        layer_windows=windows_by_layer_type(fields),
        default_max_position_embeddings=32_768,
        biased=(QKV,),
    )
    return read_llama_like(fields, ARCHITECTURE, traits)
