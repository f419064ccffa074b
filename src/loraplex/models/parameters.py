"""The weights of a decoder: what its layers hold, and of which checkpoint tensors it is made."""

import dataclasses
from collections.abc import Mapping
from typing import Protocol

import torch

from loraplex.kernels.ops import PackedLinear
from loraplex.models.config import DecoderConfig

_EMBEDDING = "model.embed_tokens"
_LM_HEAD = "lm_head"


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class LayerParameters:
    input_norm: torch.Tensor  # [hidden]
    post_attention_norm: torch.Tensor  # [hidden]
    qkv: PackedLinear  # out: q_size + 2 * kv_size
    o: PackedLinear
    gate_up: PackedLinear  # out: 2 * intermediate_size
    down: PackedLinear
    q_norm: torch.Tensor | None  # [head_dim]
    k_norm: torch.Tensor | None  # [head_dim]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class DecoderParameters:
    embedding: torch.Tensor  # [vocab_size, hidden]
    layers: tuple[LayerParameters, ...]
    final_norm: torch.Tensor  # [hidden]
    lm_head: PackedLinear  # out: vocab_size; packed from the embedding if they are tied


@dataclasses.dataclass(frozen=True, slots=True)
class LinearPlace:
    """A linear layer as a decoder uses it: the checkpoint's layers whose outputs lie side by side.

    Each of them is a tensor `<part>.weight` [out, in] and, with has_bias, `<part>.bias` [out].
    """

    parts: Mapping[str, int]
    """Outputs by the part's name, in order."""
    in_features: int
    has_bias: bool = False
    is_lm_head: bool = False

    @property
    def name(self) -> str:
        """For people: the parts' common prefix, then their own names, joined."""
        prefixes, names = zip(*(part.rpartition(".")[::2] for part in self.parts), strict=True)
        return f"{prefixes[0]}.{'+'.join(names)}" if prefixes[0] else "+".join(names)

    @property
    def shape(self) -> tuple[int, int]:
        """[out, in]"""
        return sum(self.parts.values()), self.in_features


class ParameterSource(Protocol):
    """Where a decoder's weights come from: a checkpoint, or an earlier reading of one."""

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """The checkpoint's tensor of that name, in the decoder's dtype, on its device."""
        ...

    def linear(self, place: LinearPlace) -> PackedLinear: ...


def build_parameters(config: DecoderConfig, source: ParameterSource) -> DecoderParameters:
    """Ask the source for every weight once, in the order of use."""
    vocab, hidden = config.vocab_size, config.hidden_size
    lm_head = _EMBEDDING if config.tie_word_embeddings else _LM_HEAD
    return DecoderParameters(
        embedding=source.tensor(f"{_EMBEDDING}.weight", (vocab, hidden)),
        layers=tuple(_build_layer(config, index, source) for index in range(config.num_layers)),
        final_norm=source.tensor("model.norm.weight", (hidden,)),
        lm_head=source.linear(LinearPlace({lm_head: vocab}, hidden, is_lm_head=True)),
    )


def _build_layer(config: DecoderConfig, index: int, source: ParameterSource) -> LayerParameters:
    prefix = f"model.layers.{index}."
    hidden, inner, q, kv = (
        *(config.hidden_size, config.intermediate_size),
        *(config.q_size, config.kv_size),
    )

    def norm(name: str, size: int) -> torch.Tensor:
        return source.tensor(f"{prefix}{name}.weight", (size,))

    def linear(parts: Mapping[str, int], in_features: int, has_bias: bool) -> PackedLinear:
        named = {prefix + part: size for part, size in parts.items()}
        return source.linear(LinearPlace(named, in_features, has_bias))

    qkv = {"self_attn.q_proj": q, "self_attn.k_proj": kv, "self_attn.v_proj": kv}
    gate_up = {"mlp.gate_proj": inner, "mlp.up_proj": inner}
    return LayerParameters(
        input_norm=norm("input_layernorm", hidden),
        post_attention_norm=norm("post_attention_layernorm", hidden),
        qkv=linear(qkv, hidden, config.qkv_bias),
        o=linear({"self_attn.o_proj": hidden}, q, config.o_bias),
        gate_up=linear(gate_up, hidden, config.mlp_bias),
        down=linear({"mlp.down_proj": hidden}, inner, config.mlp_bias),
        q_norm=norm("self_attn.q_norm", config.head_dim) if config.qk_norm else None,
        k_norm=norm("self_attn.k_norm", config.head_dim) if config.qk_norm else None,
    )


def checkpoint_shapes(config: DecoderConfig) -> Mapping[str, tuple[int, ...]]:
    """Every tensor that a Hugging Face checkpoint must hold. A tied lm_head is none."""
    shapes = _Shapes()
    build_parameters(config, shapes)
    return shapes.by_name


class _Shapes:
    """A source that gives nothing and notes what it was asked for."""

    def __init__(self) -> None:
        self.by_name: dict[str, tuple[int, ...]] = {}

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        self.by_name[name] = shape
        return torch.empty(shape, device="meta")

    def linear(self, place: LinearPlace) -> PackedLinear:
        for part, size in place.parts.items():
            self.by_name[f"{part}.weight"] = (size, place.in_features)
            if place.has_bias:
                self.by_name[f"{part}.bias"] = (size,)
        return None
