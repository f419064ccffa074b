"""Weights of a decoder: its tensors, and the checkpoint tensors that they are made of."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, Protocol, overload

import torch

from loraplex.kernels.ops import PackedLinear
from loraplex.models.linear_group import LinearGroup, OutputSpan
from loraplex.models.spec import (
    ROUTER,
    SHARED_GATE,
    LayerSpec,
    ModelSpec,
)
from loraplex.models.specs.part import NormKind, NormSpec, TensorSpec

SELECTION_BIAS: Final = "selection_bias"
"""FeedForwardSpec.selection_bias [num_experts]"""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class NormParameters:
    """Shapes are [size], or [num_heads, size]; float32 if the norm is rounded once."""

    weight: torch.Tensor
    bias: torch.Tensor | None = None  # of a layer norm; zeros if the checkpoint has none


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class LayerParameters:
    norms: Mapping[str, NormParameters]
    """Keys are NormPlace, and for parts the names of MixerSpec.tensors."""
    linears: Mapping[str, PackedLinear]
    """Keys are those of LayerSpec.linears."""
    tensors: Mapping[str, torch.Tensor]
    """Others, in float32. Keys are the names of MixerSpec.tensors, and SELECTION_BIAS."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class DecoderParameters:
    embedding: torch.Tensor
    """[vocab_size, hidden or embedding_size]; no rows after the first stage or if it is packed."""
    packed_embedding: PackedLinear | None
    """The same as a layer of vocab_size outputs, where it is stored like that."""
    projections: tuple[PackedLinear, ...]  # ModelSpec.embedding_size to hidden, and back; or none
    embedding_norm: NormParameters | None
    positions: torch.Tensor | None  # [max_position_embeddings, hidden], where they are learned
    layers: tuple[LayerParameters, ...]
    final_norm: NormParameters
    lm_head: PackedLinear | None  # out: vocab_size; packed from the embedding if they are tied


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
    is_embedding: bool = False
    """Whether single rows of the weight are read, not products with it."""
    is_choice: bool = False
    """Whether the outputs choose and weigh experts: a small error may choose other ones."""
    has_unit_rows: bool = False
    """Whether each row of the weight is divided by its length."""
    is_transposed: bool = False
    num_experts: int | None = None
    """Number of experts that each have these parts, under names with {expert} for the number.

    Their layers are one: its weight is [num_experts, out, in].
    """
    own_outputs: tuple[tuple[OutputSpan, ...], ...] | None = None
    """Outputs of each part that a rank of several has; None: all."""
    own_inputs: OutputSpan | None = None
    """Inputs that it has; None: all."""
    num_blocks: int = 0
    """LinearGroup.input_blocks"""

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
        """[out, in] of what is packed."""
        return sum(self.output_sizes), self.inputs.size

    @property
    def inputs(self) -> OutputSpan:
        return self.own_inputs or OutputSpan(0, self.in_features)

    @property
    def output_sizes(self) -> tuple[int, ...]:
        """Number of own outputs of each part."""
        if self.own_outputs is None:
            return tuple(self.parts.values())
        return tuple(sum(span.size for span in spans) for spans in self.own_outputs)

    def own_rows(self, part: int, tensor: torch.Tensor) -> torch.Tensor:
        """Return the own outputs of a tensor [out, ...] of the part with this index."""
        if self.own_outputs is None:
            return tensor
        return torch.cat([tensor[span.first : span.end] for span in self.own_outputs[part]])

    def own_weight(self, part: int, weight: torch.Tensor) -> torch.Tensor:
        """Return the own outputs and inputs of a weight [out, in] of the part with this index."""
        return self.own_rows(part, weight[:, self.inputs.first : self.inputs.end])

    def stored_shape(self, size: int) -> tuple[int, int]:
        """Shape, in the checkpoint, of the weight of a part with so many outputs."""
        return (self.in_features, size) if self.is_transposed else (size, self.in_features)


class ParameterSource(Protocol):
    """Origin of a decoder's weights: a checkpoint, or an earlier reading of one."""

    def tensor(
        self, name: str, shape: tuple[int, ...], num_rows: int | None = None
    ) -> torch.Tensor:
        """Return the checkpoint's tensor, in the decoder's dtype, on its device.

        num_rows: number of its first rows that are wanted; None: all.
        """
        ...

    def linear(self, place: LinearPlace) -> PackedLinear:
        """Return the layer, packed; None for an embedding whose rows are to be a tensor."""
        ...


def build_parameters(spec: ModelSpec, source: ParameterSource) -> DecoderParameters:
    """Request every weight from the source once.

    The order is part of the format of packed weights (execution.weights.packing), which have no
    names.
    """
    names, vocab, size = spec.names, spec.vocab_size, spec.embedding_size or spec.hidden_size
    embedding = names.root + names.embedding
    lm_head = embedding if spec.tie_word_embeddings else names.lm_head
    packed_embedding = None
    if spec.is_first_stage:
        packed_embedding = source.linear(LinearPlace({embedding: vocab}, size, is_embedding=True))
    has_rows = spec.is_first_stage and packed_embedding is None
    return DecoderParameters(
        embedding=source.tensor(f"{embedding}.weight", (vocab, size), None if has_rows else 0),
        packed_embedding=packed_embedding,
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
                own_outputs=None if spec.own_logits is None else ((spec.own_logits,),),
            )
        )
        if spec.is_last_stage
        else None,
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
    if not (spec.has_position_table and spec.is_first_stage):
        return None
    name = f"{spec.names.root}{spec.names.positions}.weight"
    num_rows = spec.position_offset + spec.max_position_embeddings
    return source.tensor(name, (num_rows, spec.hidden_size))[spec.position_offset :]


def _build_layer(spec: ModelSpec, layer: LayerSpec, source: ParameterSource) -> LayerParameters:
    def linear(name: str, group: LinearGroup) -> PackedLinear:
        whole, part = group.whole, group.part
        place = LinearPlace(
            dict(zip(whole.paths, whole.outputs.values(), strict=True)),
            whole.in_features,
            whole.has_bias,
            is_choice=name in (ROUTER, SHARED_GATE),
            is_transposed=spec.names.has_transposed_weights,
            num_experts=whole.num_experts,
            own_outputs=None if part is None else tuple(part.outputs.values()),
            own_inputs=None if part is None else part.inputs,
            num_blocks=group.input_blocks,
        )
        return source.linear(place)

    norms = {str(place): _build_norm(norm, source) for place, norm in layer.norms.items()}
    linears = {name: linear(name, group) for name, group in layer.linears.items()}
    tensors: dict[str, torch.Tensor] = {}
    for mixer in layer.mixers:
        for name, each in mixer.tensors().items():
            assert name not in norms, name
            assert name not in tensors, name
            if isinstance(each, NormSpec):
                norms[name] = _build_norm(each, source)
            else:
                tensors[name] = _build_tensor(each, source)
    feed_forward = layer.feed_forward
    if feed_forward is not None and feed_forward.routing and feed_forward.selection_bias:
        shape = (feed_forward.routing.num_experts,)
        bias = TensorSpec(feed_forward.selection_bias, shape)
        tensors[SELECTION_BIAS] = _build_tensor(bias, source)
    return LayerParameters(norms, linears, tensors)


def _build_tensor(tensor: TensorSpec, source: ParameterSource) -> torch.Tensor:
    whole = source.tensor(tensor.name, tensor.shape).float()
    if not tensor.own:
        return whole
    return torch.cat([whole[span.first : span.end] for span in tensor.own])


@overload
def _build_norm(norm: NormSpec, source: ParameterSource) -> NormParameters: ...
@overload
def _build_norm(norm: NormSpec | None, source: ParameterSource) -> NormParameters | None: ...
def _build_norm(norm: NormSpec | None, source: ParameterSource) -> NormParameters | None:
    if norm is None:
        return None
    own = None if norm.num_heads is None else norm.own_heads
    num_heads = norm.num_heads if own is None else own.whole
    shape = (norm.size,) if num_heads is None else (num_heads, norm.size)

    def tensor(name: str) -> torch.Tensor:
        whole = source.tensor(f"{norm.path}.{name}", shape)
        return whole if own is None else whole[own.span.first : own.span.end]

    weight = tensor("weight")
    if norm.is_rounded_once:
        weight = weight.float()
    if norm.weight_offset:
        weight = weight + norm.weight_offset
    if norm.kind is NormKind.RMS:
        return NormParameters(weight)
    bias = tensor("bias") if norm.has_bias else torch.zeros_like(weight)
    return NormParameters(weight, bias)


def checkpoint_shapes(spec: ModelSpec) -> Mapping[str, tuple[int, ...]]:
    """Return every tensor that a Hugging Face checkpoint must hold. A tied lm_head is none."""
    shapes = _Shapes()
    build_parameters(spec, shapes)
    return shapes.by_name


def linear_places(spec: ModelSpec) -> Sequence[LinearPlace]:
    """Return every linear layer, in the order of build_parameters."""
    shapes = _Shapes()
    build_parameters(spec, shapes)
    return shapes.places


class _Shapes:
    """Source that records the requests for tensors and returns none."""

    def __init__(self) -> None:
        self.by_name: dict[str, tuple[int, ...]] = {}
        self.places: list[LinearPlace] = []

    def tensor(
        self, name: str, shape: tuple[int, ...], num_rows: int | None = None
    ) -> torch.Tensor:
        self.by_name[name] = shape
        return torch.empty(shape, device="meta")[:num_rows]

    def linear(self, place: LinearPlace) -> PackedLinear:
        if place.is_embedding:
            return None
        self.places.append(place)
        for part, size in place.stored_parts():
            self.by_name[f"{part}.weight"] = place.stored_shape(size)
            if place.has_bias:
                self.by_name[f"{part}.bias"] = (size,)
        return None
