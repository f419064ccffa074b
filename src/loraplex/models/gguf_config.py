"""Model that a GGUF file describes, as the fields of a config.json.

Free of torch. Keys of metadata are those of llama.cpp's gguf-py (gguf/constants.py).
"""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from loraplex.core.errors import ConfigError
from loraplex.core.gguf import BlockType, GgufFile, part_name
from loraplex.core.gguf_names import END_TEXTS, LONG_ROPE, ROPE_FACTORS, family_of, num_layers

_BITS_IN_MEMORY: Final = {
    BlockType.Q4_0: 4 + 32 / 32,
    BlockType.Q4_1: 4 + 64 / 32,
    BlockType.Q5_0: 8 + 32 / 32,
    BlockType.Q5_1: 8 + 64 / 32,
    BlockType.Q8_0: 8 + 32 / 32,
    BlockType.Q2_K: 4 + 16 / 16 + 64 / 256,
    BlockType.Q3_K: 4 + 16 / 16 + 64 / 256,
    BlockType.Q4_K: 4 + 16 / 32 + 64 / 256,
    BlockType.Q5_K: 6 + 16 / 32 + 64 / 256,
    BlockType.Q6_K: 6 + 8 / 16 + 32 / 256,
    BlockType.IQ4_NL: 4 + 32 / 32,
    BlockType.IQ4_XS: 4 + 32 / 32,
    BlockType.MXFP4: 4 + 32 / 32,
}
_END_ROLES: Final = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
"""Roles of tokens that end an output. Those of filling in the middle begin another file."""
_STEM: Final = "model"

Fields = dict[str, Any]


def names_in_folder(num_parts: int) -> list[str]:
    """Return the names, in a folder that stands for a file, of the file or its parts."""
    if num_parts == 1:
        return [f"{_STEM}.gguf"]
    return [part_name(_STEM, number, num_parts) for number in range(1, num_parts + 1)]


def gguf_of(folder: Path) -> list[Path]:
    """Return the file of a folder that stands for one, or its parts; of another folder none."""
    whole = folder / f"{_STEM}.gguf"
    return [whole] if whole.is_file() else sorted(folder.glob(f"{_STEM}-?????-of-?????.gguf"))


class _Keys:
    """Metadata under an architecture's prefix."""

    def __init__(self, file: GgufFile) -> None:
        self.file = file
        self.architecture = file.metadata.get("general.architecture")

    def integer(self, name: str, default: int | None = None) -> int:
        """Return an integer of at least 1. Without a default it is required."""
        value = self._value(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self._wrong(name, "an integer of at least 1", value)
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """Return a positive number. Without a default it is required."""
        value = self._value(name, default)
        if not isinstance(value, int | float) or not value > 0:
            raise self._wrong(name, "a positive number", value)
        # It is a float32 in the file: the shortest decimal that is the same.
        return float(f"{value:.7g}")

    def text(self, name: str, default: str) -> str:
        value = self._value(name, default)
        if not isinstance(value, str):
            raise self._wrong(name, "a text", value)
        return value

    def _value(self, name: str, default: Any) -> Any:
        value = self.file.metadata.get(f"{self.architecture}.{name}", default)
        if value is None:
            raise ConfigError(f"{self.file.path}: metadata {self.architecture}.{name} is missing")
        return value

    def _wrong(self, name: str, wanted: str, got: object) -> ConfigError:
        shown = str(got)[:80]
        return ConfigError(
            f"{self.file.path}: metadata {self.architecture}.{name} must be {wanted}, got {shown}"
        )


def _gemma_2(keys: _Keys) -> Fields:
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "attn_logit_softcapping": keys.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": keys.number("final_logit_softcapping", 30.0),
        "sliding_window": keys.integer("attention.sliding_window", 4096),
        "query_pre_attn_scalar": _gemma_scale(keys),
    }


def _gemma_scale(keys: _Keys) -> int:
    """Return the number whose root divides scores: not in the file, 144 in the largest Gemma 2."""
    heads, size = keys.integer("attention.head_count"), keys.integer("embedding_length")
    is_27b = (keys.integer("block_count"), size) == (46, 4608)
    return size // heads if is_27b else keys.integer("attention.key_length", 256)


def _gemma_3(keys: _Keys) -> Fields:
    is_27b = keys.integer("block_count") == 62
    heads, size = keys.integer("attention.head_count"), keys.integer("embedding_length")
    head_dim = keys.integer("attention.key_length", 256)
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": keys.integer("attention.sliding_window"),
        "rope_local_base_freq": keys.number("rope.local.freq_base", 10_000.0),
        "query_pre_attn_scalar": size // heads if is_27b else head_dim,
    }


def _phi_3(keys: _Keys) -> Fields:
    window = keys.integer("attention.sliding_window", 1 << 30)
    return {"sliding_window": window if window < 1 << 30 else None}


def _qwen_35(keys: _Keys) -> Fields:
    """Return the fields of delta rules. Positions of images are not served, so neither is mrope."""
    head_dim, num_values = keys.integer("attention.key_length"), keys.integer("ssm.time_step_rank")
    rotary_dim = keys.integer("rope.dimension_count", head_dim // 4)
    return {
        "full_attention_interval": keys.integer("full_attention_interval", 4),
        "linear_num_key_heads": keys.integer("ssm.group_count"),
        "linear_num_value_heads": num_values,
        "linear_key_head_dim": keys.integer("ssm.state_size"),
        "linear_value_head_dim": keys.integer("ssm.inner_size") // num_values,
        "linear_conv_kernel_dim": keys.integer("ssm.conv_kernel"),
        "partial_rotary_factor": rotary_dim / head_dim,
    }


def _qwen_35_moe(keys: _Keys) -> Fields:
    return {
        **_qwen_35(keys),
        "num_experts": keys.integer("expert_count"),
        "num_experts_per_tok": keys.integer("expert_used_count"),
        "moe_intermediate_size": keys.integer("expert_feed_forward_length"),
        "shared_expert_intermediate_size": keys.integer("expert_shared_feed_forward_length"),
    }


def _granite_hybrid(keys: _Keys) -> Fields:
    num_heads, inner_size = keys.integer("ssm.time_step_rank"), keys.integer("ssm.inner_size")
    metadata, name = keys.file.metadata, keys.architecture
    types = ["attention" if heads else "mamba" for heads in _kv_heads(keys)]
    has_experts = bool(metadata.get(f"{name}.expert_count"))
    return {
        "layer_types": types[: _num_layers(keys)],
        "position_embedding_type": "rope"
        if metadata.get(f"{name}.rope.scaling.finetuned")
        else None,
        "mamba_n_heads": num_heads,
        "mamba_d_head": inner_size // num_heads,
        "mamba_n_groups": keys.integer("ssm.group_count"),
        "mamba_d_state": keys.integer("ssm.state_size"),
        "mamba_d_conv": keys.integer("ssm.conv_kernel"),
        "mamba_conv_bias": any(tensor.endswith("ssm_conv1d.bias") for tensor in keys.file.tensors),
        "attention_multiplier": keys.number("attention.scale", 1.0),
        "embedding_multiplier": keys.number("embedding_scale", 1.0),
        "residual_multiplier": keys.number("residual_scale", 1.0),
        "logits_scaling": keys.number("logit_scale", 1.0),
        "num_local_experts": keys.integer("expert_count") if has_experts else 0,
        "num_experts_per_tok": keys.integer("expert_used_count") if has_experts else None,
        "shared_intermediate_size": keys.integer("expert_shared_feed_forward_length"),
    }


def _nemotron_h(keys: _Keys) -> Fields:
    """Return the fields of a model whose layers each are one part."""
    num_heads, inner_size = keys.integer("ssm.time_step_rank"), keys.integer("ssm.inner_size")
    metadata, name = keys.file.metadata, keys.architecture
    has_experts = bool(metadata.get(f"{name}.expert_count"))
    found = metadata.get(f"{name}.feed_forward_length")
    sizes = found if isinstance(found, list) else []
    if not all(type(size) is int and size >= 0 for size in sizes) or not any(sizes):
        raise ConfigError(
            f"{keys.file.path}: metadata {name}.feed_forward_length must have a size for each layer"
        )
    letter = "E" if has_experts else "-"
    pattern = [
        "*" if heads else letter if size else "M"
        for heads, size in zip(_kv_heads(keys), sizes, strict=False)
    ]
    fields: Fields = {
        "hybrid_override_pattern": "".join(pattern[: _num_layers(keys)]),
        "intermediate_size": max(sizes),
        "layer_norm_epsilon": keys.number("attention.layer_norm_rms_epsilon"),
        "mamba_num_heads": num_heads,
        "mamba_head_dim": inner_size // num_heads,
        "n_groups": keys.integer("ssm.group_count"),
        "ssm_state_size": keys.integer("ssm.state_size"),
        "conv_kernel": keys.integer("ssm.conv_kernel"),
        "use_conv_bias": any(tensor.endswith("ssm_conv1d.bias") for tensor in keys.file.tensors),
    }
    if not has_experts:
        return fields
    return fields | {
        "n_routed_experts": keys.integer("expert_count"),
        "num_experts_per_tok": keys.integer("expert_used_count"),
        "n_group": keys.integer("expert_group_count", 1),
        "topk_group": keys.integer("expert_group_used_count", 1),
        "norm_topk_prob": bool(metadata.get(f"{name}.expert_weights_norm", True)),
        "routed_scaling_factor": keys.number("expert_weights_scale", 1.0),
        "moe_intermediate_size": keys.integer("expert_feed_forward_length"),
        "moe_shared_expert_intermediate_size": keys.integer("expert_shared_feed_forward_length"),
        "moe_latent_size": metadata.get(f"{name}.moe_latent_size"),
    }


def _lfm_2(keys: _Keys) -> Fields:
    tensors = keys.file.tensors
    convolves = [
        f"blk.{layer}.shortconv.conv.weight" in tensors for layer in range(_num_layers(keys))
    ]
    return {
        "norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "layer_types": ["conv" if one else "full_attention" for one in convolves],
        "conv_L_cache": keys.integer("shortconv.l_cache"),
        "block_auto_adjust_ff_dim": False,
    }


def _lfm_2_moe(keys: _Keys) -> Fields:
    """Return the fields of experts, whose weights llama.cpp always divides by their sum."""
    metadata, name = keys.file.metadata, keys.architecture
    biases = [tensor for tensor in keys.file.tensors if tensor.endswith("exp_probs_b.bias")]
    return {
        **_lfm_2(keys),
        "num_experts": keys.integer("expert_count"),
        "num_experts_per_tok": keys.integer("expert_used_count"),
        "moe_intermediate_size": keys.integer("expert_feed_forward_length"),
        "num_dense_layers": metadata.get(f"{name}.leading_dense_block_count", 0),
        "routed_scaling_factor": keys.number("expert_weights_scale", 1.0),
        "use_expert_bias": bool(biases),
    }


_MORE: Final[Mapping[str, Callable[[_Keys], Fields]]] = {
    "lfm2": _lfm_2,
    "lfm2moe": _lfm_2_moe,
    "gemma2": _gemma_2,
    "gemma3": _gemma_3,
    "phi3": _phi_3,
    "qwen35": _qwen_35,
    "qwen35moe": _qwen_35_moe,
    "qwen3next": _qwen_35_moe,
    "granitehybrid": _granite_hybrid,
    "nemotron_h": _nemotron_h,
    "nemotron_h_moe": _nemotron_h,
}
"""Fields of config.json that only an architecture has."""


def hugging_face_config(file: GgufFile) -> Fields:
    """Return the fields of config.json. Raises ConfigError, UnsupportedModelError."""
    family, keys = family_of(file), _Keys(file)
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ConfigError(f"{file.path} has no tensor token_embd.weight of two axes")
    heads, size = keys.integer("attention.head_count"), keys.integer("embedding_length")
    fields: Fields = {
        "architectures": [family.architectures[0]],
        "vocab_size": embedding.shape[0],
        "hidden_size": size,
        "intermediate_size": _inner_size(keys),
        "num_hidden_layers": _num_layers(keys),
        "num_attention_heads": heads,
        "num_key_value_heads": max(_kv_heads(keys) or [heads]),
        "head_dim": keys.integer("attention.key_length", size // heads),
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": keys.number("rope.freq_base", 10_000.0),
        "max_position_embeddings": keys.integer("context_length"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "torch_dtype": "bfloat16",
        "quantization_config": {"quant_method": "gguf", "bits_in_memory": _bits_in_memory(file)},
        **_token_ids(file, embedding.shape[0]),
        **_rope_scaling(keys),
    }
    if family.name in _MORE:
        fields |= _MORE[family.name](keys)
    return {name: value for name, value in fields.items() if value is not None}


def _inner_size(keys: _Keys) -> int | None:
    """Return the inner size of feed-forward parts; None: it differs between layers.

    A model whose layers all have experts has no size of another part.
    """
    metadata, name = keys.file.metadata, keys.architecture
    if isinstance(metadata.get(f"{name}.feed_forward_length"), list):
        return None
    has_experts = f"{name}.expert_feed_forward_length" in metadata
    default = keys.integer("expert_feed_forward_length") if has_experts else None
    return keys.integer("feed_forward_length", default)


def _kv_heads(keys: _Keys) -> list[int]:
    """Return the KV heads of each layer, or one number for all; nothing: the query heads."""
    name = "attention.head_count_kv"
    value = keys.file.metadata.get(f"{keys.architecture}.{name}")
    if not isinstance(value, list):
        return [] if value is None else [keys.integer(name)]
    is_right = all(type(number) is int and number >= 0 for number in value)
    if not is_right or len(value) != keys.integer("block_count") or not any(value):
        raise ConfigError(
            f"{keys.file.path}: metadata {keys.architecture}.{name} must have a number of heads "
            "for each layer, and one that is not 0"
        )
    return value


def _bits_in_memory(file: GgufFile) -> float:
    """Return the mean over the weights of layers on a CPU, with what belongs to groups of them.

    Layers of two types take a little more, plain floats 16, and K types in float32 6 to 10.
    """
    kinds = [
        (math.prod(tensor.shape), _BITS_IN_MEMORY.get(tensor.kind, 16.0))
        for name, tensor in file.tensors.items()
        if len(tensor.shape) > 1 and name.startswith("blk.")
    ]
    return sum(size * bits for size, bits in kinds) / max(1, sum(size for size, _ in kinds))


def _num_layers(keys: _Keys) -> int:
    """Return how many layers there are. A number far off would make a description of each."""
    count, stored = keys.integer("block_count"), len(keys.file.tensors)
    if count > stored:
        raise ConfigError(
            f"{keys.file.path}: metadata {keys.architecture}.block_count is {count}, but the file "
            f"has {stored} tensors"
        )
    return num_layers(keys.file) or count


def _token_ids(file: GgufFile, vocab_size: int) -> Fields:
    named = [_token_id(file, role, vocab_size) for role in _END_ROLES]
    texts = file.metadata.get("tokenizer.ggml.tokens", [])
    by_text = [number for number, text in enumerate(texts) if text in END_TEXTS]
    ends = dict.fromkeys(number for number in (*named, *by_text) if number is not None)
    return {
        "eos_token_id": list(ends) or None,
        "bos_token_id": _token_id(file, "bos", vocab_size),
        "pad_token_id": _token_id(file, "padding", vocab_size),
    }


def _token_id(file: GgufFile, role: str, vocab_size: int) -> int | None:
    name = f"tokenizer.ggml.{role}_token_id"
    number = file.metadata.get(name)
    if number is not None and (type(number) is not int or not 0 <= number < vocab_size):
        raise ConfigError(f"{file.path}: {name} {str(number)[:80]} is no id of {vocab_size} tokens")
    return number


def _rope_scaling(keys: _Keys) -> Fields:
    """Return rope_scaling. Factors in tensors divide the frequencies, as those of longrope do."""
    length = keys.integer("rope.scaling.original_context_length", keys.integer("context_length"))
    tensors = keys.file.tensors
    if ROPE_FACTORS in tensors:
        factors = _numbers(keys.file, ROPE_FACTORS)
        return {"rope_scaling": _longrope(factors, factors, length, 1.0)}
    if all(name in tensors for name in LONG_ROPE):
        short, long = (_numbers(keys.file, name) for name in LONG_ROPE)
        attention = keys.number("rope.scaling.attn_factor", 1.0)
        return {"rope_scaling": _longrope(short, long, length, attention)}
    kind = keys.text("rope.scaling.type", "none")
    if kind == "none":
        return {}
    return {
        "rope_scaling": {
            "rope_type": kind,
            "factor": keys.number("rope.scaling.factor"),
            "original_max_position_embeddings": length,
        }
    }


def _longrope(short: list[float], long: list[float], length: int, attention: float) -> Fields:
    return {
        "rope_type": "longrope",
        "short_factor": short,
        "long_factor": long,
        "attention_factor": attention,
        "original_max_position_embeddings": length,
    }


def _numbers(file: GgufFile, name: str) -> list[float]:
    """Read a vector of float32. Raises ConfigError for another tensor."""
    tensor = file.tensors[name]
    if tensor.kind.name != "F32" or len(tensor.shape) != 1 or tensor.shape[0] > 1 << 12:
        raise ConfigError(f"{file.path}: tensor {name} must be a vector of float32")
    return list(memoryview(file.bytes_of(name)).cast("f"))
