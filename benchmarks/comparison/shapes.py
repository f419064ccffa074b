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
    family: Literal["llama", "qwen2", "qwen3_5_text"] = "llama"
    """Value of model_type in config.json."""
    rope_theta: float = 10000.0
    is_tied: bool = False
    """Whether the embedding is the output layer, too."""
    has_qkv_bias: bool = False
    is_large: bool = False
    has_folder_weights: bool = True
    """Whether the folder has weights in bfloat16. Without them there are GGUF files only."""

    @property
    def writes_gguf(self) -> bool:
        """Whether GGUF files are written as such, and not converted from the folder."""
        return self.is_large

    @property
    def head_size(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def kv_size(self) -> int:
        return self.head_size * self.num_kv_heads

    @property
    def folder(self) -> str:
        """Name of the model's folder, which is what a server calls the model."""
        is_named = self.name.startswith((self.family, "qwen"))
        return self.name if is_named else f"{self.family}-{self.name}"

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

    def other_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the layers' tensors by name, but for linear layers and norms of inputs."""
        return {}

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """The shapes of all weights by their names in the folder; a matrix is (out, in)."""
        hidden = self.hidden_size
        found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab_size, hidden)}
        linear, others = self.linear_shapes(), self.other_shapes()
        for number in range(self.num_layers):
            layer = f"model.layers.{number}"
            found[f"{layer}.input_layernorm.weight"] = (hidden,)
            for path, size in linear.items():
                if path.startswith(f"{layer}.") and ".mlp." not in path:
                    found[f"{path}.weight"] = size
                    if self.has_qkv_bias and not path.endswith("o_proj"):
                        found[f"{path}.bias"] = size[:1]
            found |= {name: size for name, size in others.items() if name.startswith(f"{layer}.")}
            found[f"{layer}.post_attention_layernorm.weight"] = (hidden,)
            found |= {
                f"{path}.weight": size
                for path, size in linear.items()
                if path.startswith(f"{layer}.mlp.")
            }
        found["model.norm.weight"] = (hidden,)
        return found if self.is_tied else found | {"lm_head.weight": (self.vocab_size, hidden)}


class HybridShape(ModelShape, frozen=True, kw_only=True):
    """Sizes of a Qwen 3.5: three layers with a gated delta rule, then one of attention."""

    attention_head_size: int
    num_key_heads: int
    num_value_heads: int
    delta_head_size: int
    """Size of the heads of the delta rule, of keys and of values."""
    interval: int = 4
    num_taps: int = 4

    @property
    def writes_gguf(self) -> bool:
        return True

    @property
    def head_size(self) -> int:
        return self.attention_head_size

    @property
    def num_channels(self) -> int:
        """Queries, keys and values of the delta rule: what its convolution reads."""
        return (2 * self.num_key_heads + self.num_value_heads) * self.delta_head_size

    def has_attention(self, number: int) -> bool:
        return number % self.interval == self.interval - 1

    def linear_shapes(self) -> dict[str, tuple[int, int]]:
        hidden, ffn = self.hidden_size, self.ffn_size
        queries = self.num_heads * self.head_size
        values = self.num_value_heads * self.delta_head_size
        attention = {
            # With the gate of each head.
            "self_attn.q_proj": (2 * queries, hidden),
            "self_attn.k_proj": (self.kv_size, hidden),
            "self_attn.v_proj": (self.kv_size, hidden),
            "self_attn.o_proj": (hidden, queries),
        }
        delta = {
            "linear_attn.in_proj_qkv": (self.num_channels, hidden),
            "linear_attn.in_proj_z": (values, hidden),
            "linear_attn.in_proj_b": (self.num_value_heads, hidden),
            "linear_attn.in_proj_a": (self.num_value_heads, hidden),
            "linear_attn.out_proj": (hidden, values),
        }
        mlp = {
            "mlp.gate_proj": (ffn, hidden),
            "mlp.up_proj": (ffn, hidden),
            "mlp.down_proj": (hidden, ffn),
        }
        return {
            f"model.layers.{number}.{name}": size
            for number in range(self.num_layers)
            for name, size in ((attention if self.has_attention(number) else delta) | mlp).items()
        }

    def other_shapes(self) -> dict[str, tuple[int, ...]]:
        attention = {f"self_attn.{part}_norm.weight": (self.head_size,) for part in "qk"}
        delta = {
            "linear_attn.conv1d.weight": (self.num_channels, 1, self.num_taps),
            "linear_attn.A_log": (self.num_value_heads,),
            "linear_attn.dt_bias": (self.num_value_heads,),
            "linear_attn.norm.weight": (self.delta_head_size,),
        }
        return {
            f"model.layers.{number}.{name}": size
            for number in range(self.num_layers)
            for name, size in (attention if self.has_attention(number) else delta).items()
        }


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
# Of the width, the layers and the parameters of the two Llamas, with the proportions of Qwen 3.5.
TINY_HYBRID = HybridShape(
    name="qwen3.5-tiny",
    family="qwen3_5_text",
    hidden_size=512,
    num_layers=8,
    num_heads=4,
    num_kv_heads=2,
    attention_head_size=128,
    num_key_heads=2,
    num_value_heads=4,
    delta_head_size=128,
    ffn_size=1216,
)
SMALL_HYBRID = HybridShape(
    name="qwen3.5-small",
    family="qwen3_5_text",
    hidden_size=2048,
    num_layers=16,
    num_heads=8,
    num_kv_heads=2,
    attention_head_size=256,
    num_key_heads=16,
    num_value_heads=16,
    delta_head_size=128,
    ffn_size=4160,
)
_ALL: tuple[ModelShape, ...] = (TINY, SMALL, QWEN_1_5B, LLAMA_8B, TINY_HYBRID, SMALL_HYBRID)
SHAPES = {shape.name: shape for shape in _ALL}


def find_shape(name: str) -> ModelShape:
    """Raises ConfigError."""
    if name not in SHAPES:
        raise ConfigError(f"the models are {', '.join(SHAPES)}; {name!r} is none")
    return SHAPES[name]
