"""The models and adapters of a comparison: models of random numbers, made once and kept.

What they cost is that of a trained model of their shape; their text is noise, but
distinguishes adapters: every adapter changes the greedy output. Everything
follows from the shape and the seed. Needs no torch.
"""

import contextlib
import json
import math
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from comparison.fixture_tokenizer import (
    BOS_ID,
    EOS_ID,
    FIRST_WORD_ID,
    token_texts,
    write_tokenizer,
)
from comparison.gguf_model import write_gguf_model
from comparison.shapes import HybridShape, ModelShape
from comparison.systems import Adapter
from loraplex.bench.random_adapters import (
    MODULES,
    AdapterKind,
    to_bfloat16,
    write_random_adapter,
)
from loraplex.core.errors import ConfigError

_FORMAT = 1
"""Format of the files; another format gets another folder."""
_SEED = 20260
_MAX_MODEL_LEN = 2048
_ADAPTER_SHARE = 0.5
"""How large an adapter's change of a linear layer's output is, compared with the output."""
_BIAS_DEVIATION = 0.1
_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
}
_ROWS_AT_ONCE = 8192
_HEADER_ALIGNMENT = 8
"""Bytes, of the JSON header of a safetensors file."""


def adapter_kind(rank: int, modules: tuple[str, ...]) -> AdapterKind:
    """Random adapters whose change is a set share of what they change, whatever their rank."""
    alpha = 2 * rank
    return AdapterKind(
        rank=rank,
        alpha=alpha,
        modules=modules,
        b_scale=_ADAPTER_SHARE / (alpha / rank * rank**0.5),
    )


RANK_8 = adapter_kind(8, ("q_proj", "k_proj", "v_proj", "in_proj_qkv"))
"""Changes what attention reads, and what a delta rule reads in its place."""
RANK_64 = adapter_kind(64, MODULES)


class Fixture:
    """One model with its adapters, in a folder of its own below `cache`."""

    def __init__(self, shape: ModelShape, cache: Path) -> None:
        self.shape = shape
        self.tokens = token_texts(shape.vocab_size)
        self._folder = cache / f"{shape.name}-v{_FORMAT}"

    @property
    def model(self) -> Path:
        return self._folder / self.shape.folder

    @property
    def converted(self) -> Path:
        """Where systems keep what they make of the files."""
        return self._folder / "converted"

    @property
    def vocabulary(self) -> range:
        """The token ids that prompts are drawn from."""
        return range(FIRST_WORD_ID, self.shape.vocab_size)

    def ensure_model(self) -> None:
        """Write the model unless it is there. Raises ConfigError if it cannot be written."""
        if not self.model.exists():
            with _complete(self.model) as folder:
                _write_model(folder, self.shape)
        self.converted.mkdir(exist_ok=True)

    def gguf_file(self, gguf_type: str) -> Path:
        """Return the model as a GGUF file, which is written unless it is there.

        gguf_type: of comparison.gguf_model. Its numbers are not those of the folder. Raises
        ConfigError.
        """
        path = self._folder / "gguf" / f"{gguf_type}.gguf"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            draft = path.with_suffix(".draft")
            try:
                write_gguf_model(draft, self.shape, gguf_type)
                draft.rename(path)
            except OSError as error:
                draft.unlink(missing_ok=True)
                raise ConfigError(f"cannot write {path}: {error.strerror or error}") from error
        return path

    def adapters(self, kind: AdapterKind, count: int, *, first: int = 0) -> tuple[Adapter, ...]:
        """`count` adapters of a kind, from number `first` on; those missing are written.

        Adapter k is always the same. Raises ConfigError.
        """
        numbers = range(first, first + count)
        return tuple(self._adapter(kind, number) for number in numbers)

    def _adapter(self, kind: AdapterKind, number: int) -> Adapter:
        name = f"r{kind.rank}-{number:04d}"
        path = self._folder / "adapters" / name
        if not path.exists():
            with _complete(path) as folder:
                folder.rmdir()
                seed = (_SEED, kind.rank, number)
                write_random_adapter(folder, self.shape.linear_shapes(), kind, seed=seed)
        return Adapter(name=name, path=path, rank=kind.rank, alpha=kind.alpha)


@contextlib.contextmanager
def _complete(folder: Path) -> Iterator[Path]:
    """A folder to write into that gets its name only when it is whole."""
    draft = folder.with_name(folder.name + ".draft")
    try:
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        yield draft
        draft.rename(folder)
    except OSError as error:
        raise ConfigError(f"cannot write {folder}: {error.strerror or error}") from error


def _write_model(folder: Path, shape: ModelShape) -> None:
    _write_config(folder, shape)
    write_tokenizer(folder, shape.vocab_size)
    if not shape.has_folder_weights:
        return
    draws = np.random.default_rng([_SEED, shape.hidden_size, shape.num_layers])
    _write_safetensors(
        folder / "model.safetensors",
        shape.tensors(),
        lambda name, size: _values(draws, shape, name, size),
    )


def _write_safetensors(
    path: Path,
    shapes: Mapping[str, tuple[int, ...]],
    tensor: Callable[[str, tuple[int, ...]], NDArray[np.float32]],
) -> None:
    """Write a safetensors file of bfloat16 tensors, one after another: only one is in memory.

    tensor: gives the values of a name and shape. The format: a little-endian uint64 with the
    length of a JSON header, the header (padded with spaces), the tensors.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": (start, end)}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _HEADER_ALIGNMENT)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, shape in shapes.items():
            values = tensor(name, shape)
            # In pieces: rounding takes several times the memory of what is rounded.
            for start in range(0, len(values), _ROWS_AT_ONCE):
                piece = to_bfloat16(values[start : start + _ROWS_AT_ONCE])
                file.write(piece.astype("<u2").tobytes())


def _values(
    draws: np.random.Generator, shape: ModelShape, name: str, size: tuple[int, ...]
) -> NDArray[np.float32]:
    """Scaled so that what goes in and what comes out have elements of about one size.

    An embedding that is the output layer, too, is scaled as that layer: with larger numbers each
    token would be followed by itself, whatever the layers compute.
    """
    if name.endswith(".bias"):
        return draws.standard_normal(size, dtype=np.float32) * np.float32(_BIAS_DEVIATION)
    if len(size) == 1:
        # Norms of a Qwen 3.5 multiply by one more than their numbers, but for the delta rule's.
        is_centered = isinstance(shape, HybridShape) and name.endswith("norm.weight")
        return np.full(size, not is_centered or "linear_attn" in name, np.float32)
    values = draws.standard_normal(size, dtype=np.float32)
    is_embedding = name == "model.embed_tokens.weight"
    if is_embedding and not shape.is_tied:
        return values
    if is_embedding or name == "lm_head.weight":
        values[:FIRST_WORD_ID] = 0
    values /= np.float32(math.prod(size[1:]) ** 0.5)
    return values


def _write_config(folder: Path, shape: ModelShape) -> None:
    tokens = {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID}
    config = {
        "architectures": [_ARCHITECTURES[shape.family]],
        "model_type": shape.family,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.ffn_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_size,
        "hidden_act": "silu",
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": _MAX_MODEL_LEN,
        "rms_norm_eps": 1e-5,
        "rope_theta": shape.rope_theta,
        "rope_scaling": None,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": shape.is_tied,
        "torch_dtype": "bfloat16",
        **(_hybrid_fields(shape) if isinstance(shape, HybridShape) else {}),
        **tokens,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "generation_config.json").write_text(json.dumps(tokens, indent=2) + "\n")


def _hybrid_fields(shape: HybridShape) -> dict[str, object]:
    return {
        "layer_types": [
            "full_attention" if shape.has_attention(number) else "linear_attention"
            for number in range(shape.num_layers)
        ],
        "linear_conv_kernel_dim": shape.num_taps,
        "linear_key_head_dim": shape.delta_head_size,
        "linear_value_head_dim": shape.delta_head_size,
        "linear_num_key_heads": shape.num_key_heads,
        "linear_num_value_heads": shape.num_value_heads,
        # llama.cpp's converter of adapters reads no configuration without one.
        "mtp_num_hidden_layers": 1,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": shape.rope_theta,
            "partial_rotary_factor": 0.25,
        },
    }
