"""Cuts an adapter to what one rank of several holds: slices of whole pieces, never of a rank."""

import dataclasses
from collections.abc import Mapping, Sequence

import msgspec
import torch

from loraplex.core.adapter import OUTSIDE_LAYERS, LoraTarget, TargetPart
from loraplex.core.errors import AdapterMismatchError
from loraplex.core.plan import AdapterShare, targets_by_stage
from loraplex.execution.adapters.host_adapters import HostAdapter, HostPart, HostWeight
from loraplex.models.linear_group import OutputSpan
from loraplex.models.spec import ModelSpec


class AdapterCutter:
    """Column layers keep A and rows of B, row layers columns of A and B.

    A stage of a pipeline keeps its own layers, which it numbers from 0; the first one what belongs
    to the embedding, the last one all that lies outside the layers.
    """

    def __init__(self, spec: ModelSpec, share: AdapterShare | None) -> None:
        """spec: of the rank. share: models.sharding.adapter_share of all its stages' layers."""
        self._share = share
        self._spec = spec
        self._outputs: dict[tuple[int, str], Sequence[OutputSpan]] = {}
        self._inputs: dict[tuple[int, str], OutputSpan] = {}
        for layer, parts in enumerate(spec.all_layers.adapted_layers):
            for group in parts.linears.values():
                if group.part is None:
                    continue
                for module in group.modules:
                    self._outputs[layer, module] = group.part.outputs[module]
                    self._inputs[layer, module] = group.part.inputs

    def cut(self, adapter: HostAdapter) -> HostAdapter:
        """adapter: as it was read. Its pieces become those that `AdapterShare.of` names.

        Raises AdapterMismatchError if it has layers that the model does not have.
        """
        return self._of_stage(
            adapter if self._share is None else self._of_rank(adapter, self._share)
        )

    def _of_stage(self, adapter: HostAdapter) -> HostAdapter:
        if self._spec.stage_of is None:
            return adapter
        return dataclasses.replace(
            adapter,
            weights=tuple(
                dataclasses.replace(weight, target=target)
                for weight in adapter.weights
                for target in self._targets_here(weight.target)
            ),
            parts=tuple(
                dataclasses.replace(part, target=target)
                for part in adapter.parts
                for target in self._targets_here(part.target)
            ),
        )

    def _targets_here(self, target: LoraTarget) -> Sequence[LoraTarget]:
        """Return the target as the stage numbers it; nothing if it belongs to another stage."""
        spec = self._spec
        num_layers = len(spec.all_layers.adapted_layers)
        if target.layer >= num_layers:
            raise AdapterMismatchError(
                f"the adapter targets layer {target.layer}; the model has {num_layers} layers"
            )
        stage = spec.first_layers.index(spec.first_layer)
        held = targets_by_stage([target], spec.first_layers)[stage]
        if target.layer == OUTSIDE_LAYERS:
            return held
        layer = target.layer - spec.first_layer
        return tuple(msgspec.structs.replace(own, layer=layer) for own in held)

    def _of_rank(self, adapter: HostAdapter, share: AdapterShare) -> HostAdapter:
        vectors = _whole_vectors(adapter.parts)
        weights = [self._weight(weight, share) for weight in adapter.weights]
        parts: list[HostPart] = []
        for part in adapter.parts:
            for target in share.of([part.target]):
                vector = vectors.get(_vector_key(part.target))
                whole = part.values if vector is None else vector
                parts.append(self._part(part, target, whole))
        return dataclasses.replace(adapter, weights=tuple(weights), parts=tuple(parts))

    def _weight(self, weight: HostWeight, share: AdapterShare) -> HostWeight:
        key = (weight.target.layer, weight.target.module)
        if key not in self._outputs:
            return weight
        (target,) = share.of([weight.target])
        inputs = self._inputs[key]
        a, b = weight.a[:, inputs.first : inputs.end], _rows(weight.b, self._outputs[key])
        return dataclasses.replace(weight, target=target, a=a, b=b)

    def _part(self, part: HostPart, target: LoraTarget, whole: torch.Tensor) -> HostPart:
        """whole: the vector that the part is a piece of, or the part's own values."""
        spans = self._outputs.get((target.layer, target.module))
        if spans is None:
            return part
        own = _rows(whole, spans)[target.first : target.first + target.out_features]
        return dataclasses.replace(part, target=target, values=own)


_VectorKey = tuple[int, str, TargetPart]


def _vector_key(target: LoraTarget) -> _VectorKey:
    return target.layer, target.module, target.part


def _whole_vectors(parts: Sequence[HostPart]) -> Mapping[_VectorKey, torch.Tensor]:
    """Join the pieces of each vector."""
    pieces: dict[_VectorKey, list[HostPart]] = {}
    for part in sorted(parts, key=lambda part: part.target.first):
        if part.values.dim() == 1:
            pieces.setdefault(_vector_key(part.target), []).append(part)
    return {key: torch.cat([part.values for part in found]) for key, found in pieces.items()}


def _rows(tensor: torch.Tensor, spans: Sequence[OutputSpan]) -> torch.Tensor:
    if len(spans) == 1:
        return tensor[spans[0].first : spans[0].end]
    return torch.cat([tensor[span.first : span.end] for span in spans])
