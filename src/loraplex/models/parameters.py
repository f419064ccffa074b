"""Weights of a decoder: its tensors, and the checkpoint tensors that they are made of."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Protocol, overload

import torch

from loraplex.kernels.ops import PackedLinear
from loraplex.models.spec import (
    ROUTER,
    SHARED_GATE,
    FeedForwardSpec,
    LayerSpec,
    LinearGroup,
    ModelSpec,
    NormKind,
    NormPlace,
    NormSpec,
)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class NormParameters:
    """Shapes are [size], or [num_heads, size]; float32 if the norm is rounded once."""

    weight: torch.Tensor
    bias: torch.Tensor | None = None  # of a layer norm; zeros if the checkpoint has none


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class LayerParameters:
    norms: Mapping[NormPlace, NormParameters]
    linears: Mapping[str, PackedLinear]  # by the names of LayerSpec.linears
    q_norm: NormParameters | None
    k_norm: NormParameters | None
    sink_logits: torch.Tensor | None  # [num_heads] float32
    selection_bias: torch.Tensor | None  # [num_experts] float32


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class DecoderParameters:
    embedding: torch.Tensor  # [vocab_size, hidden or embedding_size]
    projections: tuple[PackedLinear, ...]  # ModelSpec.embedding_size to hidden, and back; or none
    embedding_norm: NormParameters | None
    positions: torch.Tensor | None  # [max_position_embeddings, hidden], where they are learned
    layers: tuple[LayerParameters, ...]
    final_norm: NormParameters
    lm_head: PackedLinear  # out: vocab_size; packed from the embedding if they are tied


@dataclasses.dataclass(frozen=True, slots=True)
class LinearPlace:
    """Linear layer of a decoder: layers of the checkpoint whose outputs lie side by side.

    Each of them is a tensor `<part>.weight` [out, in], if it is transposed [in, out], and, with
    has_bias, `<part>.bias` [out].
    """

    parts: Mapping[str, int]
    """Outputs by the part's name, in order."""
    in_features: int
    has_bias: bool = False
    is_lm_head: bool = False
    is_choice: bool = False
    """Whether the outputs choose and weigh experts: a small error may choose other ones."""
    has_unit_rows: bool = False
    """Whether each row of the weight is divided by its length."""
    is_transposed: bool = False
    num_experts: int | None = None
    """Number of experts that each have these parts, under names with {expert} for the number.

    Their layers are one: its weight is [num_experts, out, in].
    """

    def stored_parts(self) -> Iterator[tuple[str, int]]:
        """Yield the layers of the checkpoint, with their outputs: expert after expert."""
        for expert in range(self.num_experts or 1):
            for part, size in self.parts.items():
                yield part.format(expert=expert), size

    @property
    def name(self) -> str:
        """Name for messages: the parts' common prefix, then their own names, joined."""
        prefixes, names = zip(*(part.rpartition(".")[::2] for part in self.parts), strict=True)
        return f"{prefixes[0]}.{'+'.join(names)}" if prefixes[0] else "+".join(names)

    @property
    def shape(self) -> tuple[int, int]:
        """[out, in]"""
        return sum(self.parts.values()), self.in_features

    def stored_shape(self, size: int) -> tuple[int, int]:
        """Shape, in the checkpoint, of the weight of a part with so many outputs."""
        return (self.in_features, size) if self.is_transposed else (size, self.in_features)


class ParameterSource(Protocol):
    """Origin of a decoder's weights: a checkpoint, or an earlier reading of one."""

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Return the checkpoint's tensor, in the decoder's dtype, on its device."""
        ...

    def linear(self, place: LinearPlace) -> PackedLinear: ...


def build_parameters(spec: ModelSpec, source: ParameterSource) -> DecoderParameters:
    """Request every weight from the source once.

    The order is part of the format of packed weights (execution.weights.packing), which have no
    names.
    """
    names, vocab, size = spec.names, spec.vocab_size, spec.embedding_size or spec.hidden_size
    embedding = names.root + names.embedding
    lm_head = embedding if spec.tie_word_embeddings else names.lm_head
    return DecoderParameters(
        embedding=source.tensor(f"{embedding}.weight", (vocab, size)),
        projections=_build_projections(spec, source),
        embedding_norm=_build_norm(spec.embedding_norm, source),
        positions=_build_positions(spec, source),
        layers=tuple(_build_layer(spec, layer, source) for layer in spec.layers),
        final_norm=_build_norm(spec.final_norm, source),
        lm_head=source.linear(
            LinearPlace(
                {lm_head: vocab},
                size,
                spec.has_lm_head_bias,
                is_lm_head=True,
                has_unit_rows=spec.has_unit_lm_head,
            )
        ),
    )


def _build_projections(spec: ModelSpec, source: ParameterSource) -> tuple[PackedLinear, ...]:
    if spec.embedding_size is None:
        return ()
    first, last = (spec.names.root + name for name in spec.names.embedding_projections)
    hidden, size = spec.hidden_size, spec.embedding_size
    return (
        source.linear(LinearPlace({first: hidden}, size)),
        source.linear(LinearPlace({last: size}, hidden)),
    )


def _build_positions(spec: ModelSpec, source: ParameterSource) -> torch.Tensor | None:
    if not spec.has_position_table:
        return None
    name = f"{spec.names.root}{spec.names.positions}.weight"
    num_rows = spec.position_offset + spec.max_position_embeddings
    return source.tensor(name, (num_rows, spec.hidden_size))[spec.position_offset :]


def _build_layer(spec: ModelSpec, layer: LayerSpec, source: ParameterSource) -> LayerParameters:
    def linear(name: str, group: LinearGroup) -> PackedLinear:
        place = LinearPlace(
            dict(zip(group.paths, group.outputs.values(), strict=True)),
            group.in_features,
            group.has_bias,
            is_choice=name in (ROUTER, SHARED_GATE),
            is_transposed=spec.names.has_transposed_weights,
            num_experts=group.num_experts,
        )
        return source.linear(place)

    attention = layer.attention
    return LayerParameters(
        norms={place: _build_norm(norm, source) for place, norm in layer.norms.items()},
        linears={name: linear(name, group) for name, group in layer.linears.items()},
        q_norm=_build_norm(attention.q_norm, source),
        k_norm=_build_norm(attention.k_norm, source),
        sink_logits=_build_vector(attention.sink_logits, attention.num_heads, source),
        selection_bias=_build_selection_bias(layer.feed_forward, source),
    )


def _build_selection_bias(
    feed_forward: FeedForwardSpec, source: ParameterSource
) -> torch.Tensor | None:
    num_experts = feed_forward.routing.num_experts if feed_forward.routing else 0
    return _build_vector(feed_forward.selection_bias, num_experts, source)


def _build_vector(name: str, size: int, source: ParameterSource) -> torch.Tensor | None:
    """Return a tensor as float32; None for an empty name."""
    return source.tensor(name, (size,)).float() if name else None


@overload
def _build_norm(norm: NormSpec, source: ParameterSource) -> NormParameters: ...
@overload
def _build_norm(norm: NormSpec | None, source: ParameterSource) -> NormParameters | None: ...
def _build_norm(norm: NormSpec | None, source: ParameterSource) -> NormParameters | None:
    if norm is None:
        return None
    shape = (norm.size,) if norm.num_heads is None else (norm.num_heads, norm.size)
    weight = source.tensor(f"{norm.path}.weight", shape)
    if norm.is_rounded_once:
        weight = weight.float()
    if norm.weight_offset:
        weight = weight + norm.weight_offset
    if norm.kind is NormKind.RMS:
        return NormParameters(weight)
    bias = source.tensor(f"{norm.path}.bias", shape) if norm.has_bias else torch.zeros_like(weight)
    return NormParameters(weight, bias)


def checkpoint_shapes(spec: ModelSpec) -> Mapping[str, tuple[int, ...]]:
    """Return every tensor that a Hugging Face checkpoint must hold. A tied lm_head is none."""
    shapes = _Shapes()
    build_parameters(spec, shapes)
    return shapes.by_name


class _Shapes:
    """Source that records the requests for tensors and returns none."""

    def __init__(self) -> None:
        self.by_name: dict[str, tuple[int, ...]] = {}

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        self.by_name[name] = shape
        return torch.empty(shape, device="meta")

    def linear(self, place: LinearPlace) -> PackedLinear:
        for part, size in place.stored_parts():
            self.by_name[f"{part}.weight"] = place.stored_shape(size)
            if place.has_bias:
                self.by_name[f"{part}.bias"] = (size,)
        return None
