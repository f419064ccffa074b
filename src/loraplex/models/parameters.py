"""The weights of a decoder: what its layers hold, and of which checkpoint tensors it is made."""

import dataclasses
from collections.abc import Mapping
from typing import Protocol

import torch

from loraplex.kernels.ops import PackedLinear
from loraplex.models.config import DecoderConfig
from loraplex.models.layer_linears import LinearGroup, layer_linears


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class NormParameters:
    weight: torch.Tensor  # [size]
    bias: torch.Tensor | None = None  # [size], of a layer norm


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class LayerParameters:
    input_norm: NormParameters
    post_attention_norm: NormParameters
    qkv: PackedLinear  # out: q_size + 2 * kv_size
    o: PackedLinear
    up: PackedLinear  # out: intermediate_size, after as many of a gate if there is one
    down: PackedLinear
    q_norm: NormParameters | None  # [head_dim]
    k_norm: NormParameters | None  # [head_dim]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class DecoderParameters:
    embedding: torch.Tensor  # [vocab_size, hidden]
    positions: torch.Tensor | None  # [max_position_embeddings, hidden], where they are learned
    layers: tuple[LayerParameters, ...]
    final_norm: NormParameters
    lm_head: PackedLinear  # out: vocab_size; packed from the embedding if they are tied


@dataclasses.dataclass(frozen=True, slots=True)
class LinearPlace:
    """A linear layer as a decoder uses it: the checkpoint's layers whose outputs lie side by side.

    Each of them is a tensor `<part>.weight` [out, in], if it is transposed [in, out], and, with
    has_bias, `<part>.bias` [out].
    """

    parts: Mapping[str, int]
    """Outputs by the part's name, in order."""
    in_features: int
    has_bias: bool = False
    is_lm_head: bool = False
    is_transposed: bool = False

    @property
    def name(self) -> str:
        """For people: the parts' common prefix, then their own names, joined."""
        prefixes, names = zip(*(part.rpartition(".")[::2] for part in self.parts), strict=True)
        return f"{prefixes[0]}.{'+'.join(names)}" if prefixes[0] else "+".join(names)

    @property
    def shape(self) -> tuple[int, int]:
        """[out, in]"""
        return sum(self.parts.values()), self.in_features

    def stored_shape(self, part: str) -> tuple[int, int]:
        """Of the part's weight in the checkpoint."""
        size = self.parts[part]
        return (self.in_features, size) if self.is_transposed else (size, self.in_features)


class ParameterSource(Protocol):
    """Where a decoder's weights come from: a checkpoint, or an earlier reading of one."""

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """The checkpoint's tensor of that name, in the decoder's dtype, on its device."""
        ...

    def linear(self, place: LinearPlace) -> PackedLinear: ...


def build_parameters(config: DecoderConfig, source: ParameterSource) -> DecoderParameters:
    """Ask the source for every weight once, in the order of use."""
    names, vocab, hidden = config.names, config.vocab_size, config.hidden_size
    embedding = names.root + names.embedding
    lm_head = embedding if config.tie_word_embeddings else names.lm_head
    return DecoderParameters(
        embedding=source.tensor(f"{embedding}.weight", (vocab, hidden)),
        positions=_build_positions(config, source),
        layers=tuple(_build_layer(config, index, source) for index in range(config.num_layers)),
        final_norm=_build_norm(source, names.root + names.final_norm, hidden, config.norm_bias),
        lm_head=source.linear(LinearPlace({lm_head: vocab}, hidden, is_lm_head=True)),
    )


def _build_positions(config: DecoderConfig, source: ParameterSource) -> torch.Tensor | None:
    if config.rope is not None:
        return None
    name = f"{config.names.root}{config.names.positions}.weight"
    return source.tensor(name, (config.max_position_embeddings, config.hidden_size))


def _build_layer(config: DecoderConfig, index: int, source: ParameterSource) -> LayerParameters:
    names, prefix = config.names, config.names.layer(index)
    linears = layer_linears(config)

    def norm(name: str) -> NormParameters:
        return _build_norm(source, prefix + name, config.hidden_size, config.norm_bias)

    def head_norm(name: str) -> NormParameters | None:
        if not config.qk_norm:
            return None
        return _build_norm(source, prefix + name, config.head_dim, has_bias=False)

    def linear(group: LinearGroup) -> PackedLinear:
        paths = (prefix + path for path in group.paths)
        place = LinearPlace(
            dict(zip(paths, group.outputs.values(), strict=True)),
            group.in_features,
            group.has_bias,
            is_transposed=names.has_transposed_weights,
        )
        return source.linear(place)

    return LayerParameters(
        input_norm=norm(names.input_norm),
        post_attention_norm=norm(names.post_attention_norm),
        qkv=linear(linears.qkv),
        o=linear(linears.o),
        up=linear(linears.up),
        down=linear(linears.down),
        q_norm=head_norm(names.q_norm),
        k_norm=head_norm(names.k_norm),
    )


def _build_norm(source: ParameterSource, name: str, size: int, has_bias: bool) -> NormParameters:
    weight = source.tensor(f"{name}.weight", (size,))
    return NormParameters(weight, source.tensor(f"{name}.bias", (size,)) if has_bias else None)


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
            self.by_name[f"{part}.weight"] = place.stored_shape(part)
            if place.has_bias:
                self.by_name[f"{part}.bias"] = (size,)
        return None
