"""TensorRT-LLM's description of a model, as its convert_checkpoint.py writes it to config.json.

Nobody here reads it back: people and scripts do.
"""

from collections.abc import Mapping
from typing import Any

from loraplex.models.spec import ModelSpec, RopeConfig

_QUANT_ALGOS: Mapping[str, str | None] = {
    "none": None,
    "int8": "W8A16",
    "int4": "W4A16",
    "fp8": "FP8",
}
_INT4_GROUP = 128


def pretrained_config(
    config: ModelSpec,
    *,
    dtype: str,
    quantization: str,
    kv_dtype: str,
    tp_size: int,
    pp_size: int,
) -> dict[str, Any]:
    """dtype: of the weights; the others as models.engine_folder.BuildLimits has them."""
    layer = config.layers[0]
    return {
        "architecture": config.architecture,
        "dtype": dtype,
        "logits_dtype": "float32",
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_position_embeddings,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": layer.attention.num_heads,
        "num_key_value_heads": layer.attention.num_kv_heads,
        "head_size": layer.attention.head_dim,
        "hidden_act": config.hidden_act,
        "intermediate_size": layer.feed_forward.inner_size,
        "norm_epsilon": config.final_norm.eps,
        **_positions(layer.attention.rope),
        "use_parallel_embedding": False,
        "embedding_sharding_dim": 0,
        "mapping": {"world_size": tp_size * pp_size, "tp_size": tp_size, "pp_size": pp_size},
        "quantization": {
            "quant_algo": _QUANT_ALGOS[quantization],
            "kv_cache_quant_algo": "INT8" if kv_dtype == "int8" else None,
            "group_size": _INT4_GROUP if quantization == "int4" else None,
            "exclude_modules": None,
        },
    }


def _positions(rope: RopeConfig | None) -> dict[str, Any]:
    if rope is None:
        return {"position_embedding_type": "learned_absolute"}
    scaling = {"type": rope.rope_type, "factor": rope.factor}
    return {
        "position_embedding_type": "rope_gpt_neox",
        "rotary_base": rope.theta,
        "rotary_scaling": None if rope.rope_type == "default" else scaling,
    }
