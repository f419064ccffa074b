"""Weights of a decoder: its tensors, and the checkpoint tensors that they are made of."""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, Protocol, overload

import torch

from loraplex.kernels.ops import PackedLinear
from loraplex.models.linear_group import LinearGroup, OutputSpan
from loraplex.models.spec import (
    ROUTER,
    SHARED_GATE,
    EncoderSpec,
    LayerSpec,
    ModelSpec,
)
from loraplex.models.specs.part import NormKind, NormSpec, TensorSpec

SELECTION_BIAS: Final = "selection_bias"
"""FeedForwardSpec.selection_bias [num_experts]"""
EXPERT_FACTORS: Final = "expert_factors"
"""FeedForwardSpec.expert_factors [num_experts]"""
XIELU: Final = "xielu"
"""alpha_p, then alpha_n [2] of FeedForwardSpec.xielu"""
OUTPUT_FACTOR: Final = "output_factor"
"""LayerSpec.output_factor [1]"""


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
    """Others, in float32. Keys are the names of MixerSpec.tensors, SELECTION_BIAS, EXPERT_FACTORS,
    XIELU and OUTPUT_FACTOR."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class LayerInputParameters:
    """Weights of the own inputs of L layers, of size P each, in addition to LAYER_INPUTS."""

    table: torch.Tensor  # [vocab_size, L * P]
    norm: NormParameters


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class EncoderParameters:
    """Weights of an encoder, which has no token embedding of its own."""

    embedding_norm: NormParameters | None
    positions: torch.Tensor | None  # [longest_input, hidden], where they are not rotated or biased
    layers: tuple[LayerParameters, ...]
    final_norm: NormParameters | None


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class DecoderParameters:
    embedding: torch.Tensor
    """[vocab_size, hidden or embedding_size]; no rows after the first stage or if it is packed."""
    packed_embedding: PackedLinear | None
    """The same as a layer of vocab_size outputs: stored like that, or lm_head itself."""
    projections: tuple[PackedLinear, ...]  # ModelSpec.embedding_size to hidden, and back; or none
    embedding_norm: NormParameters | None
    positions: torch.Tensor | None  # [max_position_embeddings, hidden], where they are learned
    layers: tuple[LayerParameters, ...]
    final_norm: NormParameters
    lm_head: PackedLinear | None
    """Out: vocab_size; packed from the embedding if they are tied."""
    score: torch.Tensor | None = None  # [num_labels, hidden or embedding_size] float32
    encoder: EncoderParameters | None = None
    layer_inputs: LayerInputParameters | None = None


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
    bias: str = ""
    """Full name of a tensor [1, out] that is the bias of the only part; empty: the part's."""
    is_lm_head: bool = False
    is_embedding: bool = False
    """Whether single rows of the weight are read; with is_lm_head products as well."""
    is_choice: bool = False
    """Whether the outputs choose and weigh experts: a small error may choose other ones."""
    has_unit_rows: bool = False
    """Whether each row of the weight is divided by its length."""
    is_taken_apart: bool = False
    """LinearGroup.is_taken_apart"""
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
        """Return the layer, packed; None for an embedding whose rows are to be a tensor, also for
        one that is lm_head as well.
        """
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
        place = LinearPlace(
            {embedding: vocab}, size, is_lm_head=spec.has_shared_head, is_embedding=True
        )
        packed_embedding = source.linear(place)
    shared = packed_embedding if spec.has_shared_head else None
    has_rows = spec.is_first_stage and packed_embedding is None
    return DecoderParameters(
        embedding=source.tensor(f"{embedding}.weight", (vocab, size), None if has_rows else 0),
        packed_embedding=packed_embedding,
        projections=_build_projections(spec, source),
        embedding_norm=_build_norm(spec.embedding_norm, source),
        positions=_build_positions(spec, source),
        layers=tuple(_build_layer(spec, layer, source) for layer in spec.layers),
        final_norm=_build_norm(spec.final_norm, source),
        lm_head=shared
        if shared is not None or not (spec.is_last_stage and spec.has_lm_head)
        else source.linear(
            LinearPlace(
                {lm_head: vocab},
                size,
                spec.has_lm_head_bias or bool(spec.logits_bias),
                spec.logits_bias,
                is_lm_head=True,
                has_unit_rows=spec.has_unit_lm_head,
                own_outputs=None if spec.own_logits is None else ((spec.own_logits,),),
            )
        ),
        score=source.tensor(f"{names.score}.weight", (spec.num_labels, size)).float()
        if spec.num_labels and spec.is_last_stage
        else None,
        # Last, so that the order of other models' weights stays.
        encoder=None if spec.encoder is None else _build_encoder(spec, spec.encoder, source),
        layer_inputs=_build_layer_inputs(spec, source) if spec.layer_input_size else None,
    )


def _build_encoder(
    spec: ModelSpec, encoder: EncoderSpec, source: ParameterSource
) -> EncoderParameters:
    return EncoderParameters(
        embedding_norm=_build_norm(encoder.embedding_norm, source),
        positions=_position_table(spec, encoder.positions, encoder.longest_input, source),
        layers=tuple(_build_layer(spec, layer, source) for layer in encoder.layers),
        final_norm=_build_norm(encoder.final_norm, source),
    )


def layer_input_norm(spec: ModelSpec) -> NormSpec:
    """Return the norm of the layers' own inputs, which a model has that has these."""
    path = spec.names.root + spec.names.layer_inputs[-1]
    return dataclasses.replace(spec.final_norm, path=path, size=spec.layer_input_size)


def _build_layer_inputs(spec: ModelSpec, source: ParameterSource) -> LayerInputParameters:
    table = spec.names.root + spec.names.layer_inputs[0]
    size = spec.num_layers * spec.layer_input_size
    return LayerInputParameters(
        table=source.tensor(f"{table}.weight", (spec.vocab_size, size)),
        norm=_build_norm(layer_input_norm(spec), source),
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
    name = spec.names.root + spec.names.positions
    return _position_table(spec, name, spec.max_position_embeddings, source)


def _position_table(
    spec: ModelSpec, path: str, num_positions: int, source: ParameterSource
) -> torch.Tensor | None:
    """Return vectors [num_positions, hidden] that are read or computed; None: there are none."""
    size, offset = spec.hidden_size, spec.position_offset
    if spec.sinusoid_step:
        like = _no_rows(spec, source)
        return sinusoids(num_positions, offset, size, spec.sinusoid_step).to(like)
    if not path:
        return None
    return source.tensor(f"{path}.weight", (offset + num_positions, size))[offset:]


def sinusoids(num_positions: int, offset: int, size: int, step: float) -> torch.Tensor:
    """Return sines, then cosines, of the positions from offset on [num_positions, size].

    Angle i of position p is p * 10000 ** (-i / step), as transformers has it.
    """
    half = size // 2
    positions = torch.arange(offset, offset + num_positions, dtype=torch.float64).unsqueeze(1)
    angles = positions * torch.exp(torch.arange(half).double() * (-math.log(10_000.0) / step))
    return torch.cat((angles.sin(), angles.cos()), dim=1).float()


def _build_layer(spec: ModelSpec, layer: LayerSpec, source: ParameterSource) -> LayerParameters:
    def linear(name: str, group: LinearGroup) -> PackedLinear:
        whole, part = group.whole, group.part
        place = LinearPlace(
            dict(zip(whole.paths, whole.outputs.values(), strict=True)),
            whole.in_features,
            whole.has_bias,
            is_choice=name in (ROUTER, SHARED_GATE),
            is_transposed=spec.names.has_transposed_weights,
            is_taken_apart=whole.is_taken_apart,
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
                norms[name] = (
                    _build_norm(each, source) if each.path else _unit_norm(each, spec, source)
                )
            else:
                tensors[name] = _build_tensor(each, source)
    feed_forward = layer.feed_forward
    if feed_forward is not None and feed_forward.routing and feed_forward.selection_bias:
        rows = (1,) if feed_forward.is_selection_bias_row else ()
        shape = (*rows, feed_forward.routing.num_experts)
        bias = TensorSpec(feed_forward.selection_bias, shape)
        tensors[SELECTION_BIAS] = _build_tensor(bias, source).flatten()
    if feed_forward is not None and feed_forward.routing and feed_forward.expert_factors:
        factors = TensorSpec(feed_forward.expert_factors, (feed_forward.routing.num_experts,))
        tensors[EXPERT_FACTORS] = _build_tensor(factors, source)
    if feed_forward is not None and feed_forward.xielu:
        names = (f"{feed_forward.xielu}.{name}" for name in ("alpha_p", "alpha_n"))
        tensors[XIELU] = torch.cat([_build_tensor(TensorSpec(n, (1,)), source) for n in names])
    if layer.output_factor:
        tensors[OUTPUT_FACTOR] = _build_tensor(TensorSpec(layer.output_factor, (1,)), source)
    return LayerParameters(norms, linears, tensors)


def _unit_norm(norm: NormSpec, spec: ModelSpec, source: ParameterSource) -> NormParameters:
    """Return weights of one for a norm that has none in the checkpoint."""
    return NormParameters(_no_rows(spec, source).new_ones(norm.size))


def _no_rows(spec: ModelSpec, source: ParameterSource) -> torch.Tensor:
    """Return a tensor without rows, of the type and the device of the model's tensors."""
    size = spec.embedding_size or spec.hidden_size
    name = f"{spec.names.root}{spec.names.embedding}.weight"
    return source.tensor(name, (spec.vocab_size, size), 0)


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

    weight = tensor(norm.weight_name)
    if norm.is_rounded_once:
        weight = weight.float()
    if norm.weight_offset:
        weight = weight + norm.weight_offset
    if norm.weight_factor != 1:
        weight = weight * norm.weight_factor
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
            if place.bias:
                self.by_name[place.bias] = (1, size)
            elif place.has_bias:
                self.by_name[f"{part}.bias"] = (size,)
        return None
