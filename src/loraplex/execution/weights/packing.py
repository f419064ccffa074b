"""Packs a checkpoint's weights, one layer at a time: only one is in memory twice."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from tqdm import tqdm

from loraplex.core.byte_sizes import readable_bytes
from loraplex.core.errors import ConfigError
from loraplex.core.weight_precision import WeightPrecision
from loraplex.execution.weights.background_store import BackgroundStore
from loraplex.execution.weights.checkpoint import Checkpoint
from loraplex.execution.weights.quantized.packable import (
    in_super_blocks,
    packable,
    stacked_experts,
)
from loraplex.execution.weights.quantized.stored_weight import StoredWeight
from loraplex.execution.weights.weight_files import weight_files
from loraplex.kernels.block_rows import BlockRows, joined_rows
from loraplex.kernels.ops import Kernels, LinearParts, PackedLinear
from loraplex.kernels.quantization import StoredNumbers, quantization_error
from loraplex.models.parameters import (
    DecoderParameters,
    LinearPlace,
    ParameterSource,
    build_parameters,
)
from loraplex.models.spec import ModelSpec
from loraplex.models.stored_format import refuse_second_quantization


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WeightFormat:
    """How a model's weights are kept in memory."""

    dtype: torch.dtype
    """Type of tensors that are not quantised."""
    precision: WeightPrecision = WeightPrecision.NATIVE
    device: torch.device = dataclasses.field(default_factory=functools.partial(torch.device, "cpu"))

    def precision_of(self, place: LinearPlace) -> WeightPrecision:
        """The logits feel every error of the lm_head: it is int8 where the others are coarser.

        What chooses experts is small, and not quantised.
        """
        if place.is_choice or place.is_embedding:
            return WeightPrecision.NATIVE
        if place.is_lm_head and self.precision is not WeightPrecision.NATIVE:
            return WeightPrecision.INT8
        return self.precision


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class PackedWeights:
    """A decoder's parameters, also as a list in the order of build_parameters."""

    parameters: DecoderParameters
    entries: Sequence[LinearParts]
    """A tensor that is no linear layer is an entry without numbers."""
    summary: str = ""
    """What quantisation, or the reading of a quantised checkpoint, cost, for people; or empty."""
    storing: BackgroundStore | None = None
    """Work that writes them for the next start; None: they need not be written."""

    @property
    def num_bytes(self) -> int:
        return sum(entry.num_bytes for entry in self.entries)


def pack_checkpoint(
    folder: Path,
    spec: ModelSpec,
    kernels: Kernels,
    form: WeightFormat,
    *,
    shows_progress: bool = True,
) -> PackedWeights:
    """Read and pack the weights in `folder`. Raises ConfigError, also if weights that are stored
    quantised are to be quantised once more.

    At any moment the memory holds what is packed, and one linear layer as it was read.
    """
    refuse_second_quantization(spec.stored_format, form.precision)
    with (
        Checkpoint(folder, spec) as checkpoint,
        tqdm(
            total=len(checkpoint),
            desc="Loading weights",
            unit="tensor",
            # None: only where a person watches.
            disable=None if shows_progress else True,
        ) as bar,
    ):
        source = _CheckpointSource(checkpoint, kernels, form, bar.update)
        noting = _NotingSource(source, kernels)
        parameters = build_parameters(spec, noting)
    summary = source.errors.summary(form.precision)
    if spec.stored_format is not None:
        stored = sum(path.stat().st_size for path in weight_files(folder))
        packed = sum(entry.num_bytes for entry in noting.entries)
        summary = (
            f"weights that are stored as {spec.stored_format.method} "
            f"{source.widened.summary(form.dtype)}: "
            f"{readable_bytes(packed)} in memory, {readable_bytes(stored)} in files"
        )
    return PackedWeights(parameters, noting.entries, summary)


def join_entries(
    entries: Sequence[LinearParts], spec: ModelSpec, kernels: Kernels, summary: str
) -> PackedWeights:
    """The weights whose entries `pack_checkpoint` gave, for the same model."""
    return PackedWeights(build_parameters(spec, _EntrySource(entries, kernels)), entries, summary)


class _CheckpointSource:
    """Implements `ParameterSource`."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        kernels: Kernels,
        form: WeightFormat,
        progress: Callable[[int], object],
    ) -> None:
        self._checkpoint = checkpoint
        self._kernels = kernels
        self._form = form
        self._progress = progress
        self.errors = _QuantizationErrors()
        self.widened = _WidenedLayers()

    def tensor(
        self, name: str, shape: tuple[int, ...], num_rows: int | None = None
    ) -> torch.Tensor:
        if num_rows is None:
            return self._joined([name], shape)
        if num_rows == 0:
            return torch.empty((0, *shape[1:]), dtype=self._form.dtype, device=self._form.device)
        return self._joined([name], (num_rows, *shape[1:]), lambda _, tensor: tensor[:num_rows])

    def linear(self, place: LinearPlace) -> PackedLinear:
        precision = self._form.precision_of(place)
        num_outputs, num_inputs = place.shape
        experts = () if place.num_experts is None else (place.num_experts,)
        bias = None
        if place.has_bias:
            bias = self._read(place, "bias", (num_outputs,)).view(*experts, num_outputs)
        is_shared = place.is_embedding and place.is_lm_head
        if is_shared and self._form.precision is not WeightPrecision.NATIVE:
            return None
        blocks = self._blocks(place)
        if blocks is not None:
            packed = self._packed_blocks(place, blocks, bias)
            if packed is not None:
                return packed
        stored = self._stored(place)
        quantized = self._quantized(place, stored)
        if quantized is None and place.is_embedding and (stored or not is_shared):
            return None
        if quantized is not None:
            quantized = quantized.to(self._form.device)
            return self._kernels.pack_linear(quantized, bias, precision, place.num_blocks)
        weight = self._read(place, "weight", (num_outputs, num_inputs))
        weight = weight.view(*experts, num_outputs, num_inputs)
        if place.has_unit_rows:
            weight = torch.nn.functional.normalize(weight.float()).to(weight.dtype)
        try:
            packed = self._kernels.pack_linear(weight, bias, precision, place.num_blocks)
        except ConfigError as error:
            raise ConfigError(f"{place.name}: {error.message}", param="quantization") from error
        if precision is not WeightPrecision.NATIVE:
            self.errors.note(place.name, quantization_error(weight.flatten(0, -2), precision))
        return packed

    def _blocks(self, place: LinearPlace) -> BlockRows | None:
        """Return the layer's own part of weights in blocks, expert after expert; None: some of its
        weights are no blocks that kernels read, or the part cuts one.

        In float32 the inputs keep 16 bits, and not 8 as with blocks.
        """
        if place.is_choice or place.has_unit_rows or self._form.dtype is torch.float32:
            return None
        found = []
        for index, (part, size) in enumerate(place.stored_parts()):
            rows = self._checkpoint.blocks(f"{part}.weight", (size, place.in_features))
            own = rows and rows.inputs(place.inputs.first, place.inputs.end)
            if own is None:
                return None
            found.append(own.rows(functools.partial(place.own_rows, index % len(place.parts))))
        joined = joined_rows(found)
        num_experts = place.num_experts
        if num_experts is None:
            return joined
        return joined.rows(lambda rows: rows.view(num_experts, -1))

    def _packed_blocks(
        self, place: LinearPlace, blocks: BlockRows, bias: torch.Tensor | None
    ) -> PackedLinear | None:
        try:
            packed = self._kernels.pack_blocks(blocks, bias, place.num_blocks)
        except ConfigError as error:
            raise ConfigError(f"{place.name}: {error.message}") from error
        if packed is not None:
            self.widened.note(place.name, is_widened=False)
            self._progress(sum(1 for _ in place.stored_parts()))
        return packed

    def _quantized(
        self, place: LinearPlace, weights: Sequence[StoredWeight]
    ) -> StoredNumbers | None:
        """Join a layer's weights as they are stored; None: its numbers are to be read instead.

        What chooses experts is decoded: a product in whole numbers rounds its inputs.
        """
        if not weights:
            return None
        found, num_parts = None, sum(1 for _ in place.stored_parts())
        if len(weights) == num_parts and not (place.is_choice or place.has_unit_rows):
            forms = _joined_weights(place, weights, self._form)
            takes = functools.partial(self._kernels.takes_quantized, num_blocks=place.num_blocks)
            found = next(filter(takes, forms), None)
        if place.is_embedding and found is None:
            return None
        self.widened.note(place.name, is_widened=found is None)
        if found is not None:
            self._progress(num_parts)
        return found

    def _stored(self, place: LinearPlace) -> list[StoredWeight]:
        """Return the parts that are stored quantised."""
        stored = (
            self._checkpoint.stored(f"{part}.weight", (size, place.in_features))
            for part, size in place.stored_parts()
        )
        return [weight for weight in stored if weight is not None]

    def _read(self, place: LinearPlace, kind: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Read the weights, or the biases, of all parts: those of experts one after another.

        shape: of one expert, or of a layer without.
        """

        def own(index: int, tensor: torch.Tensor) -> torch.Tensor:
            part = index % len(place.parts)
            if kind == "bias":
                return place.own_rows(part, tensor)
            return place.own_weight(part, tensor.T if place.is_transposed else tensor)

        if kind == "bias" and place.bias:
            return self._joined(
                [place.bias], shape, lambda index, bias: place.own_rows(index, bias[0])
            )
        names = [f"{part}.{kind}" for part, _ in place.stored_parts()]
        return self._joined(names, ((place.num_experts or 1) * shape[0], *shape[1:]), own)

    def _joined(
        self,
        names: Sequence[str],
        shape: tuple[int, ...],
        own: Callable[[int, torch.Tensor], torch.Tensor] = lambda _, tensor: tensor,
    ) -> torch.Tensor:
        """Concatenate the named tensors along the first axis: never a view of a file.

        own: part of each tensor, by its index, that is used.
        """
        joined = torch.empty(shape, dtype=self._form.dtype, device=self._form.device)
        start = 0
        for index, name in enumerate(names):
            tensor = own(index, self._checkpoint.read(name))
            joined[start : start + len(tensor)] = tensor
            start += len(tensor)
            self._progress(1)
        return joined


def _joined_weights(
    place: LinearPlace, weights: Sequence[StoredWeight], form: WeightFormat
) -> Iterator[StoredNumbers]:
    """Join the layer's own part of weights [out, in], expert after expert, in each form it has.

    The results are [out, in], or [E, out, in]. First comes the form that kernels read least for. In
    float32 the numbers are the very ones that are stored, and meet inputs of 16 bits: not those of
    8 that super-blocks have. Of an embedding only super-blocks are kept.
    """
    is_exact = form.dtype is torch.float32
    num_parts, inputs, num_blocks = len(place.parts), place.inputs, max(1, place.num_blocks)
    own = [
        weight.inputs(inputs.first, inputs.end).rows(
            functools.partial(place.own_rows, index % num_parts)
        )
        for index, weight in enumerate(weights)
    ]
    joins: list[Callable[[Sequence[StoredWeight], int], StoredNumbers | None]] = []
    if not is_exact:
        joins.append(in_super_blocks)
    if not place.is_embedding:
        joins.append(functools.partial(packable, is_exact=is_exact))
    for join in joins:
        experts = [
            join(own[first : first + num_parts], num_blocks)
            for first in range(0, len(own), num_parts)
        ]
        found = [expert for expert in experts if expert is not None]
        if len(found) < len(experts):
            continue
        joined = found[0] if place.num_experts is None else stacked_experts(found)
        if joined is not None:
            yield joined


class _EntrySource:
    """Implements `ParameterSource`: what was noted, in the same order."""

    def __init__(self, entries: Sequence[LinearParts], kernels: Kernels) -> None:
        self._entries = iter(entries)
        self._kernels = kernels

    def tensor(
        self, name: str, shape: tuple[int, ...], num_rows: int | None = None
    ) -> torch.Tensor:
        (tensor,) = next(self._entries).tensors
        assert tensor is not None
        assert tensor.shape == (shape if num_rows is None else (num_rows, *shape[1:])), name
        return tensor

    def linear(self, place: LinearPlace) -> PackedLinear:
        del place
        parts = next(self._entries)
        return self._kernels.join_linear(parts) if parts.tensors else None


class _NotingSource:
    """Passes on what another source gives, and notes it."""

    def __init__(self, source: ParameterSource, kernels: Kernels) -> None:
        self._source = source
        self._kernels = kernels
        self.entries: list[LinearParts] = []

    def tensor(
        self, name: str, shape: tuple[int, ...], num_rows: int | None = None
    ) -> torch.Tensor:
        tensor = self._source.tensor(name, shape, num_rows)
        self.entries.append(LinearParts((), (tensor,)))
        return tensor

    def linear(self, place: LinearPlace) -> PackedLinear:
        packed = self._source.linear(place)
        parts = LinearParts((), ()) if packed is None else self._kernels.linear_parts(packed)
        self.entries.append(parts)
        return packed


class _WidenedLayers:
    """Layers that are stored quantised, and those of them that are decoded for the kernels."""

    def __init__(self) -> None:
        self._num_layers = 0
        self._widened: list[str] = []

    def note(self, name: str, *, is_widened: bool) -> None:
        self._num_layers += 1
        if is_widened:
            self._widened.append(name)

    def summary(self, dtype: torch.dtype) -> str:
        widened = f"widened to {str(dtype).removeprefix('torch.')}"
        if len(self._widened) == self._num_layers:
            return f"are {widened}"
        if not self._widened:
            return "are kept as they are"
        return (
            f"are kept as they are, but {len(self._widened)} of {self._num_layers} layers, such as "
            f"{self._widened[0]}, are {widened}"
        )


class _QuantizationErrors:
    """Relative errors of weights, in the 2-norm."""

    def __init__(self) -> None:
        self._by_name: dict[str, float] = {}

    def note(self, name: str, error: float) -> None:
        self._by_name[name] = error

    def summary(self, precision: WeightPrecision) -> str:
        if not self._by_name:
            return ""
        mean = (sum(error**2 for error in self._by_name.values()) / len(self._by_name)) ** 0.5
        worst = max(self._by_name, key=self._by_name.__getitem__)
        return (
            f"{precision} weights differ by {mean:.2%} from the checkpoint's (root mean square; "
            f"most, {self._by_name[worst]:.2%}, in {worst})"
        )
