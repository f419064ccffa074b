"""A model as one GGUF file of random weights, written in seconds, for us and llama.cpp.

The mixes are those of llama-quantize: in Q4_K_M and Q5_K_M the output layer is in Q6_K, and so are
the value and down projections of half of the layers. The tokenizer is that of the fixtures. Format:
ggml/docs/gguf.md of llama.cpp, version 3.
"""

import math
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from comparison.fixture_tokenizer import (
    BOS_ID,
    EOS_ID,
    FIRST_WORD_ID,
    NUM_BYTE_TOKENS,
    NUM_SPECIAL,
    token_texts,
)
from comparison.gguf_blocks import random_rows
from comparison.shapes import HybridShape, ModelShape
from loraplex.core.errors import ConfigError
from loraplex.core.gguf import BlockType

_ALIGNMENT = 32
# The value types of metadata by the Python type that stands for them here; a list is of strings,
# floats or whole numbers.
_UINT32, _FLOAT32, _BOOL, _STRING, _ARRAY = 4, 6, 7, 8, 9
_INT32 = 5
# The type of most tensors, that of those which get more bits, and the number of the whole as
# llama.cpp counts file types.
_MIXES = {
    "F16": (BlockType.F16, BlockType.F16, 1),
    "BF16": (BlockType.BF16, BlockType.BF16, 32),
    "Q8_0": (BlockType.Q8_0, BlockType.Q8_0, 7),
    "Q4_K_M": (BlockType.Q4_K, BlockType.Q6_K, 15),
    "Q5_K_M": (BlockType.Q5_K, BlockType.Q6_K, 17),
    "Q6_K": (BlockType.Q6_K, BlockType.Q6_K, 18),
}
GGUF_PREFIX = "gguf:"
"""Beginning of the name of weights that are a GGUF file's: gguf:Q4_K_M."""
_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_HYBRID_NAMES = _NAMES | {
    "post_attention_layernorm": "post_attention_norm",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.out_proj": "ssm_out",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.A_log": "ssm_a",
    "linear_attn.dt_bias": "ssm_dt.bias",
}
_ARCHITECTURES = {"qwen3_5_text": "qwen35"}
"""Names of architectures that are not those in config.json."""
_BIAS_DEVIATION = 0.1
_SEED = 20261
_NORMAL, _UNKNOWN, _CONTROL, _BYTE = 1, 2, 3, 6
"""Types of tokens."""


def tensor_types(shape: ModelShape, gguf_type: str) -> dict[str, BlockType]:
    """Return the type of each tensor by its name in the folder. Raises ConfigError."""
    if gguf_type not in _MIXES:
        raise _unknown(gguf_type)
    most, more_bits, _ = _MIXES[gguf_type]

    def type_of(name: str, size: tuple[int, ...]) -> BlockType:
        if len(size) == 1 or "conv1d" in name:
            return BlockType.F32
        if name == "lm_head.weight" or (shape.is_tied and name == "model.embed_tokens.weight"):
            return more_bits
        if name.endswith(("v_proj.weight", "down_proj.weight")):
            number = int(name.split(".")[2])
            return more_bits if _has_more_bits(number, shape.num_layers) else most
        return most

    return {name: type_of(name, size) for name, size in shape.tensors().items()}


def gguf_bits(gguf_type: str) -> int:
    """Return the nominal width of the weights of a type. Raises ConfigError."""
    if gguf_type not in _MIXES:
        raise _unknown(gguf_type)
    return int(gguf_type.lstrip("BFQ").partition("_")[0])


def _unknown(gguf_type: str) -> ConfigError:
    return ConfigError(f"a GGUF file is written in {', '.join(_MIXES)}; {gguf_type!r} is none")


def tensor_bytes(size: tuple[int, ...], kind: BlockType) -> int:
    return math.prod(size) // kind.num_values * kind.num_bytes


def write_gguf_model(path: Path, shape: ModelShape, gguf_type: str) -> None:
    """Write the file, one tensor after another: only one is in memory. Raises ConfigError."""
    types = tensor_types(shape, gguf_type)
    sizes = {
        name: (size[0], *size[2:]) if "conv1d" in name else size
        for name, size in shape.tensors().items()
    }
    infos, offset = [], 0
    for name, kind in types.items():
        infos.append(_tensor_info(_name_in_file(shape, name), sizes[name], kind, offset))
        offset += _aligned(tensor_bytes(sizes[name], kind))
    entries = [*_metadata(shape, gguf_type)]
    head = b"GGUF" + struct.pack("<IQQ", 3, len(types), len(entries))
    head += b"".join(entries) + b"".join(infos)
    draws = np.random.default_rng([_SEED, shape.hidden_size, shape.num_layers])
    with path.open("wb") as file:
        file.write(head + bytes(_aligned(len(head)) - len(head)))
        for name, kind in types.items():
            data = _tensor(shape, name, sizes[name], kind, draws)
            data.tofile(file)
            file.write(bytes(_aligned(data.nbytes) - data.nbytes))


def _has_more_bits(number: int, num_layers: int) -> bool:
    """Return whether a layer is of those with more bits: the first and last eighth, and of the rest
    each third (use_more_bits in src/llama-quant.cpp)."""
    eighth = num_layers // 8
    return number < eighth or number >= 7 * num_layers // 8 or (number - eighth) % 3 == 2


def _tensor(
    shape: ModelShape,
    name: str,
    size: tuple[int, ...],
    kind: BlockType,
    draws: np.random.Generator,
) -> np.ndarray[Any, np.dtype[Any]]:
    """Scaled as the weights of the folder are."""
    match size:
        case (count,) if name.endswith(".bias"):
            return draws.standard_normal(count, dtype=np.float32) * np.float32(_BIAS_DEVIATION)
        case (count,):
            # The file has the rate of decay itself, which the folder has the logarithm of.
            return np.full(count, -math.e if name.endswith("A_log") else 1, np.float32)
        case (rows, columns) if kind is BlockType.F32:
            values = draws.standard_normal((rows, columns), dtype=np.float32)
            return values * np.float32(columns**-0.5)
        case (rows, columns):
            is_embedding = name == "model.embed_tokens.weight"
            is_output = name == "lm_head.weight" or (is_embedding and shape.is_tied)
            deviation = 1.0 if is_embedding and not shape.is_tied else columns**-0.5
            num_zero_rows = FIRST_WORD_ID if is_output else 0
            return random_rows(kind, (rows, columns), deviation, draws, num_zero_rows)
        case _:
            raise AssertionError(f"{name} is a vector or a matrix")


def _name_in_file(shape: ModelShape, name: str) -> str:
    whole = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    path, _, kind = name.rpartition(".")
    if path in whole:
        return f"{whole[path]}.{kind}"
    names = _HYBRID_NAMES if isinstance(shape, HybridShape) else _NAMES
    _, _, number, part = name.split(".", 3)
    own = names.get(part) or f"{names[part.removesuffix(f'.{kind}')]}.{kind}"
    return f"blk.{number}.{own}"


def _tensor_info(name: str, size: tuple[int, ...], kind: BlockType, offset: int) -> bytes:
    """Sizes stand in the order of memory: the fastest first."""
    dimensions = struct.pack(f"<I{len(size)}Q", len(size), *reversed(size))
    return _string(name) + dimensions + struct.pack("<IQ", kind.number, offset)


def _metadata(shape: ModelShape, gguf_type: str) -> Iterator[bytes]:
    architecture = _ARCHITECTURES.get(shape.family, shape.family)
    hybrid = _hybrid_fields(shape) if isinstance(shape, HybridShape) else {}
    numbers: Mapping[str, int | float | bool | str] = {
        "general.architecture": architecture,
        "general.name": shape.folder,
        "general.file_type": _MIXES[gguf_type][2],
        "general.quantization_version": 2,
        f"{architecture}.vocab_size": shape.vocab_size,
        f"{architecture}.context_length": 2048,
        f"{architecture}.embedding_length": shape.hidden_size,
        f"{architecture}.block_count": shape.num_layers,
        f"{architecture}.feed_forward_length": shape.ffn_size,
        f"{architecture}.attention.head_count": shape.num_heads,
        f"{architecture}.attention.head_count_kv": shape.num_kv_heads,
        f"{architecture}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{architecture}.rope.dimension_count": shape.head_size,
        f"{architecture}.rope.freq_base": shape.rope_theta,
        **{f"{architecture}.{name}": value for name, value in hybrid.items()},
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.bos_token_id": BOS_ID,
        "tokenizer.ggml.eos_token_id": EOS_ID,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.ggml.add_eos_token": False,
    }
    for key, value in numbers.items():
        yield _string(key) + _value(value)
    if hybrid:
        sections = np.array([1, 1, 1, 0], "<i4").tobytes()
        yield _string(f"{architecture}.rope.dimension_sections") + _array(_INT32, 4, sections)
    texts = token_texts(shape.vocab_size)
    kinds = [_token_type(token_id) for token_id in range(len(texts))]
    encoded = b"".join(map(_string, texts))
    yield _string("tokenizer.ggml.tokens") + _array(_STRING, len(texts), encoded)
    # Pairs of letters join before pairs of pairs: the earlier token has the higher score.
    scores = -np.arange(len(texts), dtype="<f4")
    yield _string("tokenizer.ggml.scores") + _array(_FLOAT32, len(texts), scores.tobytes())
    encoded_kinds = np.array(kinds, "<i4").tobytes()
    yield _string("tokenizer.ggml.token_type") + _array(_INT32, len(texts), encoded_kinds)


def _hybrid_fields(shape: HybridShape) -> dict[str, int | float]:
    return {
        "rope.dimension_count": shape.head_size // 4,
        "attention.key_length": shape.head_size,
        "attention.value_length": shape.head_size,
        "ssm.conv_kernel": shape.num_taps,
        "ssm.state_size": shape.delta_head_size,
        "ssm.group_count": shape.num_key_heads,
        "ssm.time_step_rank": shape.num_value_heads,
        "ssm.inner_size": shape.delta_head_size * shape.num_value_heads,
        "full_attention_interval": shape.interval,
    }


def _token_type(token_id: int) -> int:
    if token_id == 0:
        return _UNKNOWN
    if token_id < NUM_SPECIAL:
        return _CONTROL
    return _BYTE if token_id < NUM_SPECIAL + NUM_BYTE_TOKENS else _NORMAL


def _value(value: float | bool | str) -> bytes:
    match value:
        case bool():
            return struct.pack("<I?", _BOOL, value)
        case int():
            return struct.pack("<II", _UINT32, value)
        case float():
            return struct.pack("<If", _FLOAT32, value)
        case _:
            return struct.pack("<I", _STRING) + _string(value)


def _array(kind: int, count: int, encoded: bytes) -> bytes:
    return struct.pack("<IIQ", _ARRAY, kind, count) + encoded


def _string(text: str) -> bytes:
    encoded = text.encode()
    return struct.pack("<Q", len(encoded)) + encoded


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
