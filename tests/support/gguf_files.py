"""GGUF files, written by the format's description, and blocks decoded by llama.cpp's package.

No file is written by the code that reads them.
"""

import json
import re
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file

from loraplex.core.gguf import read_gguf

TYPES = {
    "F32": (0, 1, 4),
    "F16": (1, 1, 2),
    "BF16": (30, 1, 2),
    "Q4_0": (2, 32, 18),
    "Q4_1": (3, 32, 20),
    "Q5_0": (6, 32, 22),
    "Q5_1": (7, 32, 24),
    "Q8_0": (8, 32, 34),
    "Q2_K": (10, 256, 84),
    "Q3_K": (11, 256, 110),
    "Q4_K": (12, 256, 144),
    "Q5_K": (13, 256, 176),
    "Q6_K": (14, 256, 210),
    "IQ4_NL": (20, 32, 18),
    "IQ4_XS": (23, 256, 136),
    "MXFP4": (39, 32, 17),
}
"""Number, values in a block, and its bytes."""
_HALVES = {
    **dict.fromkeys(("Q4_0", "Q5_0", "Q8_0", "IQ4_NL", "IQ4_XS"), (0,)),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q6_K": (208,),
}
"""Where a block has float16."""

Bytes = npt.NDArray[np.uint8]


def text(value: str) -> bytes:
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


def field(name: str, value: Any) -> bytes:
    return text(name) + _value(value)


def _value(value: Any) -> bytes:
    match value:
        case bool():
            return struct.pack("<I?", 7, value)
        case int():
            return struct.pack("<II", 4, value)
        case float():
            return struct.pack("<If", 6, value)
        case str():
            return struct.pack("<I", 8) + text(value)
    items = list(value)
    head = struct.pack("<IIQ", 9, 8 if isinstance(items[0], str) else 5, len(items))
    return head + b"".join(
        text(item) if isinstance(item, str) else struct.pack("<i", item) for item in items
    )


def gguf_bytes(
    metadata: Mapping[str, Any], tensors: Mapping[str, tuple[str, tuple[int, ...], bytes]]
) -> bytes:
    """tensors: type, shape with the outputs first, and bytes by name."""
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    head += b"".join(field(name, value) for name, value in metadata.items())
    body = b""
    for name, (kind, shape, data) in tensors.items():
        head += text(name) + struct.pack("<I", len(shape))
        head += b"".join(struct.pack("<Q", size) for size in reversed(shape))
        head += struct.pack("<IQ", TYPES[kind][0], len(body))
        body += data + bytes(-len(data) % 32)
    return head + bytes(-len(head) % 32) + body


def random_blocks(kind: str, num_outputs: int, num_inputs: int, seed: int = 0) -> Bytes:
    """Return random bytes whose scales are small numbers: [outputs, bytes of a row]."""
    rng = np.random.default_rng(seed)
    _, values, size = TYPES[kind]
    num_blocks = num_outputs * num_inputs // values
    blocks = rng.integers(0, 256, (num_blocks, size), dtype=np.uint8)
    for start in _HALVES.get(kind, ()):
        halves = (0.01 + 0.1 * rng.random(num_blocks)).astype(np.float16)
        blocks[:, start : start + 2] = halves.view(np.uint8).reshape(-1, 2)
    if kind == "MXFP4":
        blocks[:, 0] = rng.integers(118, 123, num_blocks)
    if kind in ("F32", "F16"):
        numbers = rng.standard_normal(num_blocks).astype("<f4" if kind == "F32" else "<f2")
        blocks = numbers.view(np.uint8)
    if kind == "BF16":
        numbers = rng.standard_normal(num_blocks).astype("<f4")
        blocks = numbers.view(np.uint8).reshape(-1, 4)[:, 2:].copy()
    return blocks.reshape(num_outputs, -1)


def small_blocks(kind: str, num_outputs: int, num_inputs: int, seed: int = 0) -> Bytes:
    """Return random blocks of about the numbers that models have: a deviation of 0.03."""
    rows = random_blocks(kind, num_outputs, num_inputs, seed)
    factor = np.float32(0.03) / decode(kind, rows).std().numpy()
    blocks = rows.reshape(-1, TYPES[kind][2])
    for start in _HALVES[kind]:
        halves = blocks[:, start : start + 2].copy().view(np.float16)
        blocks[:, start : start + 2] = (halves * factor).astype(np.float16).view(np.uint8)
    return blocks.reshape(rows.shape)


def decode(kind: str, rows: Bytes) -> torch.Tensor:
    """Return the numbers of rows, as llama.cpp's own package decodes them: [outputs, inputs]."""
    numbers = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[kind])
    return torch.tensor(np.asarray(numbers, dtype=np.float32))


_NAMES = {
    "model.embed_tokens": "token_embd",
    "lm_head": "output",
    "model.norm": "output_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    **{f"self_attn.{part}_proj": f"attn_{part}" for part in "qkv"},
    "self_attn.o_proj": "attn_output",
    **{f"mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
}


def gguf_of_llama(folder: Path, kinds: Mapping[str, str] | None = None) -> bytes:
    """Return a Llama of a folder, with a byte-level tokenizer of GPT-2's rule, in Q8_0.

    kinds: types of weights by a part of their names, the first that fits; these are random.
    """
    config = json.loads((folder / "config.json").read_text())
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    metadata = {
        "general.architecture": "llama",
        "llama.block_count": config["num_hidden_layers"],
        "llama.embedding_length": config["hidden_size"],
        "llama.feed_forward_length": config["intermediate_size"],
        "llama.context_length": config["max_position_embeddings"],
        "llama.attention.head_count": heads,
        "llama.attention.head_count_kv": kv_heads,
        "llama.attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "llama.rope.freq_base": float(config["rope_parameters"]["rope_theta"]),
        **tokenizer_fields(json.loads((folder / "tokenizer.json").read_text())),
    }
    tensors: dict[str, tuple[str, tuple[int, ...], bytes]] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        numbers = tensor.float().numpy()
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            numbers = rotated(numbers, heads if "q_proj" in name else kv_heads)
        kind = "Q8_0" if numbers.ndim == 2 else "F32"
        data = ENCODERS[kind](numbers)
        random = next((other for part, other in (kinds or {}).items() if part in name), None)
        if random and numbers.ndim == 2:
            size, num_inputs = numbers.shape
            kind, data = random, small_blocks(random, size, num_inputs, len(tensors)).tobytes()
        tensors[_own_name(name)] = (kind, numbers.shape, data)
    return gguf_bytes(metadata, tensors)


def gguf_of_lora(
    folder: Path, base: Path, kind: str = "F32", *, permutes: bool = True, **changes: Any
) -> bytes:
    """Return a PEFT adapter of a Llama as llama.cpp stores it.

    kind: of factors whose rows are whole blocks; others are F16, as the converter writes them.
    permutes: False is a mistake that readers must show. changes: metadata, None removes it.
    """
    config = json.loads((folder / "adapter_config.json").read_text())
    of_base = json.loads((base / "config.json").read_text())
    heads = {
        "q_proj": of_base["num_attention_heads"],
        "k_proj": of_base["num_key_value_heads"],
    }
    metadata = {
        "general.architecture": "llama",
        "general.type": "adapter",
        "adapter.type": "lora",
        "adapter.lora.alpha": float(config["lora_alpha"]),
    } | {name.replace("__", "."): value for name, value in changes.items()}
    tensors = {}
    for name, tensor in load_file(folder / "adapter_model.safetensors").items():
        module, factor = re.fullmatch(  # type: ignore[union-attr]
            r"base_model\.model\.(.+)\.lora_(?:embedding_)?([AB])(?:\.weight)?", name
        ).groups()
        numbers = tensor.float().numpy()
        if permutes and factor == "B" and (count := heads.get(module.rpartition(".")[2])):
            numbers = rotated(numbers, count)
        if factor == "A" and "embed_tokens" in module:
            numbers = numbers.T
        own = f"{_own_name(f'{module}.weight')}.lora_{factor.lower()}"
        stored = kind if numbers.shape[1] % TYPES[kind][1] == 0 else "F16"
        tensors[own] = (stored, numbers.shape, ENCODERS[stored](numbers))
    kept = {name: value for name, value in metadata.items() if value is not None}
    return gguf_bytes(kept, tensors)


def rotated(rows: npt.NDArray[np.floating], num_heads: int) -> npt.NDArray[np.floating]:
    """Put the two rows of each pair that rotates side by side."""
    shape = (num_heads, 2, len(rows) // num_heads // 2, -1)
    return rows.reshape(shape).swapaxes(1, 2).reshape(rows.shape)


def _own_name(name: str) -> str:
    module, _, kind = name.rpartition(".")
    if not module.startswith("model.layers."):
        return f"{_NAMES[module]}.{kind}"
    _, _, layer, part = module.split(".", 3)
    return f"blk.{layer}.{_NAMES[part]}.{kind}"


def _q8_0(numbers: npt.NDArray[np.floating]) -> bytes:
    blocks = numbers.reshape(-1, 32).astype(np.float32)
    scales = (np.abs(blocks).max(1, keepdims=True) / 127).astype(np.float16)
    codes = np.round(blocks / np.maximum(scales.astype(np.float32), 1e-9)).astype(np.int8)
    return np.concatenate((scales.view(np.uint8), codes.view(np.uint8)), axis=1).tobytes()


ENCODERS: dict[str, Callable[[npt.NDArray[np.floating]], bytes]] = {
    "F32": lambda numbers: numbers.astype("<f4").tobytes(),
    "F16": lambda numbers: numbers.astype("<f2").tobytes(),
    "BF16": lambda numbers: (numbers.astype("<f4").view("<u4") >> 16).astype("<u2").tobytes(),
    "Q8_0": _q8_0,
}


def tokenizer_fields(tokenizer: dict[str, Any]) -> dict[str, Any]:
    added = {token["id"]: token["content"] for token in tokenizer["added_tokens"]}
    texts = {number: token for token, number in tokenizer["model"]["vocab"].items()} | added
    merges = tokenizer["model"]["merges"]
    named = {name: token for token, name in added.items()}
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [texts[number] for number in range(len(texts))],
        "tokenizer.ggml.token_type": [3 if n in added else 1 for n in range(len(texts))],
        "tokenizer.ggml.merges": [m if isinstance(m, str) else " ".join(m) for m in merges],
        "tokenizer.ggml.bos_token_id": named["<s>"],
        "tokenizer.ggml.eos_token_id": named["</s>"],
        "tokenizer.ggml.add_bos_token": True,
    }


def split_gguf(path: Path, count: int, stem: str = "tiny") -> list[Path]:
    """Write a file's parts next to it, as llama-gguf-split does: metadata in the first alone."""
    read = read_gguf(path)
    names = list(read.tensors)
    parts = []
    for number in range(count):
        split = {"split.no": number, "split.count": count, "split.tensors.count": len(names)}
        tensors = {
            name: (tensor.kind.name, tensor.shape, bytes(read.bytes_of(name)))
            for name, tensor in read.tensors.items()
            if names.index(name) * count // len(names) == number
        }
        part = path.with_name(f"{stem}-{number + 1:05d}-of-{count:05d}.gguf")
        part.write_bytes(gguf_bytes(split if number else {**read.metadata, **split}, tensors))
        parts.append(part)
    return parts
