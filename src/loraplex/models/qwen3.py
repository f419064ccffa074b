"""Qwen 3: norms on the query and key heads; the head size is set apart from the hidden size."""

from loraplex.models.config_fields import ConfigFields
from loraplex.models.family_config import LlamaTraits, read_llama_like, windows_by_layer_type
from loraplex.models.spec import OUTPUT, QKV, ModelSpec

ARCHITECTURE = "Qwen3ForCausalLM"


def read_config(fields: ConfigFields) -> ModelSpec:
    traits = LlamaTraits(
        layer_windows=windows_by_layer_type(fields),
        default_max_position_embeddings=32_768,
        default_head_dim=128,
        biased=(QKV, OUTPUT) if fields.boolean("attention_bias", False) else (),
        has_head_norms=True,
    )
    return read_llama_like(fields, ARCHITECTURE, traits)
