"""The models and adapters of a comparison: Llamas of random numbers, made once and kept.

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

import msgspec
import numpy as np
from numpy.typing import NDArray

from comparison.fixture_tokenizer import (
    BOS_ID,
    EOS_ID,
    FIRST_WORD_ID,
    token_texts,
    write_tokenizer,
)
from comparison.systems import Adapter
from loraplex.bench.random_adapters import (
    MODULES,
    AdapterKind,
    linear_shapes,
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
_HEADER_ALIGNMENT = 8
"""Bytes, of the JSON header of a safetensors file."""


class LlamaShape(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    ffn_size: int
    vocab_size: int = 32000

    @property
    def num_parameters(self) -> int:
        return sum(math.prod(size) for size in self.tensors().values())

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """The shapes of all weights by their names in the file; a matrix is (out, in)."""
        hidden, ffn = self.hidden_size, self.ffn_size
        kv_size = hidden // self.num_heads * self.num_kv_heads
        found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab_size, hidden)}
        for number in range(self.num_layers):
            layer = f"model.layers.{number}"
            found |= {
                f"{layer}.input_layernorm.weight": (hidden,),
                f"{layer}.self_attn.q_proj.weight": (hidden, hidden),
                f"{layer}.self_attn.k_proj.weight": (kv_size, hidden),
                f"{layer}.self_attn.v_proj.weight": (kv_size, hidden),
                f"{layer}.self_attn.o_proj.weight": (hidden, hidden),
                f"{layer}.post_attention_layernorm.weight": (hidden,),
                f"{layer}.mlp.gate_proj.weight": (ffn, hidden),
                f"{layer}.mlp.up_proj.weight": (ffn, hidden),
                f"{layer}.mlp.down_proj.weight": (hidden, ffn),
            }
        return found | {"model.norm.weight": (hidden,), "lm_head.weight": (self.vocab_size, hidden)}


TINY = LlamaShape(
    name="tiny", hidden_size=512, num_layers=8, num_heads=8, num_kv_heads=4, ffn_size=1408
)
SMALL = LlamaShape(
    name="small", hidden_size=2048, num_layers=16, num_heads=32, num_kv_heads=8, ffn_size=5632
)
SHAPES = {shape.name: shape for shape in (TINY, SMALL)}


def adapter_kind(rank: int, modules: tuple[str, ...]) -> AdapterKind:
    """Random adapters whose change is a set share of what they change, whatever their rank."""
    alpha = 2 * rank
    return AdapterKind(
        rank=rank,
        alpha=alpha,
        modules=modules,
        b_scale=_ADAPTER_SHARE / (alpha / rank * rank**0.5),
    )


RANK_8 = adapter_kind(8, ("q_proj", "k_proj", "v_proj"))
RANK_64 = adapter_kind(64, MODULES)


class Fixture:
    """One model with its adapters, in a folder of its own below `cache`."""

    def __init__(self, shape: LlamaShape, cache: Path) -> None:
        self.shape = shape
        self.tokens = token_texts(shape.vocab_size)
        self._folder = cache / f"{shape.name}-v{_FORMAT}"

    @property
    def model(self) -> Path:
        return self._folder / shape_folder(self.shape)

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
                write_random_adapter(folder, self._shapes(), kind, seed=seed)
        return Adapter(name=name, path=path, rank=kind.rank, alpha=kind.alpha)

    def _shapes(self) -> dict[str, tuple[int, int]]:
        return linear_shapes(self.model)


def shape_folder(shape: LlamaShape) -> str:
    """The model's folder; its name is what a server calls the model."""
    return f"llama-{shape.name}"


def find_shape(name: str) -> LlamaShape:
    """Raises ConfigError."""
    if name not in SHAPES:
        raise ConfigError(f"the models are {', '.join(SHAPES)}; {name!r} is none")
    return SHAPES[name]


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


def _write_model(folder: Path, shape: LlamaShape) -> None:
    _write_config(folder, shape)
    write_tokenizer(folder, shape.vocab_size)
    draws = np.random.default_rng([_SEED, shape.hidden_size, shape.num_layers])
    _write_safetensors(
        folder / "model.safetensors",
        shape.tensors(),
        lambda name, size: _values(draws, name, size),
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
            file.write(to_bfloat16(tensor(name, shape)).astype("<u2").tobytes())


def _values(draws: np.random.Generator, name: str, size: tuple[int, ...]) -> NDArray[np.float32]:
    """Scaled so that what goes in and what comes out have elements of about one size."""
    if len(size) == 1:
        return np.ones(size, np.float32)
    values = draws.standard_normal(size, dtype=np.float32)
    if name == "model.embed_tokens.weight":
        return values
    if name == "lm_head.weight":
        values[:FIRST_WORD_ID] = 0
    values /= np.float32(size[1] ** 0.5)
    return values


def _write_config(folder: Path, shape: LlamaShape) -> None:
    tokens = {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID}
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.ffn_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.hidden_size // shape.num_heads,
        "hidden_act": "silu",
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": _MAX_MODEL_LEN,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        **tokens,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "generation_config.json").write_text(json.dumps(tokens, indent=2) + "\n")
