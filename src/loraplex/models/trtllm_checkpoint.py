"""TensorRT-LLM's own checkpoint folders: config.json, and a rankN.safetensors for each GPU.

Translates its description of a model to the Hugging Face one. Only floating-point checkpoints are
read: the others hold weights in the layouts of TensorRT's kernels. Free of torch.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from loraplex.core.errors import UnsupportedModelError
from loraplex.models.config_fields import ConfigFields

_GPT = "GPTForCausalLM"
_ARCHITECTURES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "LlamaForCausalLM": "LlamaForCausalLM",
        "MistralForCausalLM": "MistralForCausalLM",
        "Qwen2ForCausalLM": "Qwen2ForCausalLM",
        "Qwen3ForCausalLM": "Qwen3ForCausalLM",
        _GPT: "GPT2LMHeadModel",
    }
)
_QWEN: Final = ("QWenForCausalLM", "QWenLMHeadModel")
"""Names of several generations, which qwen_type distinguishes."""
_FIELDS: Final = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "vocab_size", "max_position_embeddings", "hidden_act", "dtype"),
    *("mlp_bias", "sliding_window"),
)
"""Fields that have one name in both."""
_RENAMED: Final[Mapping[str, str]] = MappingProxyType(
    {
        "head_size": "head_dim",
        "norm_epsilon": "rms_norm_eps",
        "rotary_base": "rope_theta",
        "rotary_scaling": "rope_scaling",
        "attn_bias": "attention_bias",
        "share_embedding_table": "tie_word_embeddings",
    }
)
_GPT_FIELDS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "hidden_size": "n_embd",
        "intermediate_size": "n_inner",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "vocab_size": "vocab_size",
        "max_position_embeddings": "n_positions",
        "norm_epsilon": "layer_norm_epsilon",
        "dtype": "dtype",
    }
)
_TANH_GELUS: Final = ("gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh")
"""TensorRT-LLM computes each of them by the tanh formula."""


def is_trtllm_checkpoint(fields: ConfigFields) -> bool:
    """Whether a config.json describes a model, not an engine, in TensorRT-LLM's words.

    So does the one of our own checkpoint folders.
    """
    return "architecture" in fields and "architectures" not in fields


def read_mapping(fields: ConfigFields) -> tuple[int, int]:
    """(tensor parallel, pipeline parallel): the GPUs that the model was split for."""
    mapping = fields.table("mapping")
    if mapping is None:
        return 1, 1
    return mapping.integer("tp_size", 1), mapping.integer("pp_size", 1)


def hugging_face_values(fields: ConfigFields) -> dict[str, Any]:
    """The fields of a Hugging Face config.json.

    Raises UnsupportedModelError for what is not served, or not read from such a folder.
    """
    _refuse_quantised(fields)
    moe = fields.table("moe")
    if moe is not None and (moe.optional_integer("num_experts") or 0) > 0:
        raise UnsupportedModelError(
            f"{fields.source}: mixtures of experts in TensorRT-LLM's tensors are not supported; "
            "supported is the Hugging Face folder that they were made from"
        )
    architecture = _architecture(fields)
    if fields.text("architecture", "") == _GPT:
        return _gpt2(fields, architecture)
    kept = {name: fields.values[name] for name in _FIELDS if name in fields}
    renamed = _renamed(fields, _RENAMED)
    return {"architectures": [architecture], "sliding_window": None} | kept | renamed


def _gpt2(fields: ConfigFields, architecture: str) -> dict[str, Any]:
    variant = fields.text("gpt_variant", "gpt2")
    if variant != "gpt2":
        raise UnsupportedModelError(f"{fields.source}: gpt_variant {variant!r} is not supported")
    activation = fields.text("hidden_act", "gelu")
    return _renamed(fields, _GPT_FIELDS) | {
        "architectures": [architecture],
        "activation_function": "gelu_new" if activation in _TANH_GELUS else activation,
        "tie_word_embeddings": fields.boolean("share_embedding_table", False),
    }


def _renamed(fields: ConfigFields, names: Mapping[str, str]) -> dict[str, Any]:
    return {theirs: fields.values[name] for name, theirs in names.items() if name in fields}


def _architecture(fields: ConfigFields) -> str:
    name = fields.text("architecture", "")
    if name in _QWEN:
        name = f"{fields.text('qwen_type', '').capitalize()}ForCausalLM"
    if name not in _ARCHITECTURES:
        raise UnsupportedModelError(
            f"{fields.source}: architecture {fields.text('architecture', '')} of TensorRT-LLM is "
            f"not supported; supported: {', '.join(_ARCHITECTURES)}"
        )
    return _ARCHITECTURES[name]


def _refuse_quantised(fields: ConfigFields) -> None:
    quantization = fields.table("quantization")
    algorithm = "" if quantization is None else quantization.text("quant_algo", "")
    if algorithm:
        raise UnsupportedModelError(
            f"{fields.source}: quant_algo {algorithm}: weights that were quantised for TensorRT's "
            "kernels are not read: convert the Hugging Face folder again, with loraplex "
            "compat convert-checkpoint"
        )
