"""Shapes of the models under comparison, and the types of GGUF files that they can be had in.

A large model is one that a comparison cannot run like the small ones: one system is up at a time,
workloads are short (comparison.sizes), and GGUF files are written as such, of random blocks, in
place of a conversion that takes several times the disk and memory of the file.
"""

import math
from typing import Literal

import msgspec

from loraplex.core.errors import ConfigError


class ModelShape(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of a decoder of the Llama kind."""

    name: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    ffn_size: int
    vocab_size: int = 32000
    family: Literal["llama", "qwen2"] = "llama"
    """Value of model_type in config.json, and of the architecture in a GGUF file."""
    rope_theta: float = 10000.0
    is_tied: bool = False
    """Whether the embedding is the output layer, too."""
    has_qkv_bias: bool = False
    is_large: bool = False
    has_folder_weights: bool = True
    """Whether the folder has weights in bfloat16. Without them there are GGUF files only."""

    @property
    def head_size(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def kv_size(self) -> int:
        return self.head_size * self.num_kv_heads

    @property
    def folder(self) -> str:
        """Name of the model's folder, which is what a server calls the model."""
        return self.name if self.name.startswith(self.family) else f"{self.family}-{self.name}"

    @property
    def num_parameters(self) -> int:
        return sum(math.prod(size) for size in self.tensors().values())

    def linear_shapes(self) -> dict[str, tuple[int, int]]:
        """The shapes (out, in) of the layers' matrices by path, without those of the vocabulary."""
        hidden, ffn = self.hidden_size, self.ffn_size
        sizes = {
            "self_attn.q_proj": (hidden, hidden),
            "self_attn.k_proj": (self.kv_size, hidden),
            "self_attn.v_proj": (self.kv_size, hidden),
            "self_attn.o_proj": (hidden, hidden),
            "mlp.gate_proj": (ffn, hidden),
            "mlp.up_proj": (ffn, hidden),
            "mlp.down_proj": (hidden, ffn),
        }
        return {
            f"model.layers.{number}.{name}": size
            for number in range(self.num_layers)
            for name, size in sizes.items()
        }

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """The shapes of all weights by their names in the folder; a matrix is (out, in)."""
        hidden = self.hidden_size
        found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab_size, hidden)}
        linear = self.linear_shapes()
        for number in range(self.num_layers):
            layer = f"model.layers.{number}"
            found[f"{layer}.input_layernorm.weight"] = (hidden,)
            for path, size in linear.items():
                if path.startswith(f"{layer}.self_attn."):
                    found[f"{path}.weight"] = size
                    if self.has_qkv_bias and not path.endswith("o_proj"):
                        found[f"{path}.bias"] = size[:1]
            found[f"{layer}.post_attention_layernorm.weight"] = (hidden,)
            found |= {
                f"{path}.weight": size
                for path, size in linear.items()
                if path.startswith(f"{layer}.mlp.")
            }
        found["model.norm.weight"] = (hidden,)
        return found if self.is_tied else found | {"lm_head.weight": (self.vocab_size, hidden)}


TINY = ModelShape(
    name="tiny", hidden_size=512, num_layers=8, num_heads=8, num_kv_heads=4, ffn_size=1408
)
SMALL = ModelShape(
    name="small", hidden_size=2048, num_layers=16, num_heads=32, num_kv_heads=8, ffn_size=5632
)
QWEN_1_5B = ModelShape(
    name="qwen2.5-1.5b",
    family="qwen2",
    hidden_size=1536,
    num_layers=28,
    num_heads=12,
    num_kv_heads=2,
    ffn_size=8960,
    vocab_size=151936,
    rope_theta=1e6,
    is_tied=True,
    has_qkv_bias=True,
    is_large=True,
)
LLAMA_8B = ModelShape(
    name="llama-3.1-8b",
    hidden_size=4096,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    ffn_size=14336,
    vocab_size=128256,
    rope_theta=5e5,
    is_large=True,
    has_folder_weights=False,
)
SHAPES = {shape.name: shape for shape in (TINY, SMALL, QWEN_1_5B, LLAMA_8B)}


def find_shape(name: str) -> ModelShape:
    """Raises ConfigError."""
    if name not in SHAPES:
        raise ConfigError(f"the models are {', '.join(SHAPES)}; {name!r} is none")
    return SHAPES[name]
