"""What mixers of all kinds have in common: how one is made, and what it reads of a step."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import torch

from loraplex.core.plan import CacheGroupId
from loraplex.kernels.lora import LoraBatch, LoraPlace
from loraplex.kernels.ops import Kernels, PackedLinear, Storage
from loraplex.kernels.routing import Routes
from loraplex.models.batch import ForwardBatch
from loraplex.models.linear_group import LinearGroup
from loraplex.models.parameters import LayerParameters
from loraplex.models.specs.part import LayerCache, RopeConfig


class Linear:
    """Group of linear layers as a decoder layer runs it: the base's product, then LoRA."""

    def __init__(
        self, packed: PackedLinear, group: LinearGroup, layer: int, kernels: Kernels
    ) -> None:
        """packed: by these kernels, from the layers of the group."""
        self._packed = packed
        self._kernels = kernels
        self._place = LoraPlace(layer, group.modules, group.first_outputs, group.input_blocks)

    def forward(self, x: torch.Tensor, lora: LoraBatch | None) -> torch.Tensor:
        """x [T, in] -> [T, out]."""
        y = self._kernels.linear(x, self._packed)
        if lora is not None:
            self._kernels.add_lora(y, x, lora, self._place)
        return y

    def forward_pairs(
        self, x: torch.Tensor, lora: LoraBatch | None, routes: Routes
    ) -> torch.Tensor:
        """x [T, in] or [T * k, in] -> [T * k, out], for a group of experts."""
        y = self._kernels.grouped_linear(x, self._packed, routes)
        if lora is not None:
            self._kernels.add_expert_lora(y, x, lora, routes, self._place)
        return y


def taps_by_channel(weight: torch.Tensor) -> torch.Tensor:
    """Return the weight [C, K] of Kernels.causal_conv, from that of a checkpoint, [C, 1, K].

    Numbers of one tap lie side by side, as kernels read them.
    """
    return weight.squeeze(1).t().contiguous().t()


Angles = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines [T, rotary_dim / 2]."""


Storages = tuple[tuple[Storage | None, ...], ...]
"""Storage by cache group and layer; None: the layer keeps nothing there."""


class PlanKind(Protocol):
    """What one plan of a step depends on. Mixers with equal kinds share the plan."""

    def __hash__(self) -> int: ...

    def planner(self, kernels: Kernels, device: torch.device) -> Callable[[ForwardBatch], object]:
        """Return what makes the plan of a step; called once, when the decoder is built.

        A plan is a parameter of Kernels.repeat: for steps of one size it has one size.
        """
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class MixerInputs:
    """What the layers read of a step, made once a step."""

    batch: ForwardBatch
    storages: Storages
    angles: Mapping[RopeConfig, Angles]
    plans: Mapping[PlanKind, object]
    layer_inputs: torch.Tensor | None = None
    """Own inputs of all layers [T, L * ModelSpec.layer_input_size], where they have such."""


class LayerPlace(NamedTuple):
    """What a part knows of its layer."""

    layer: int
    linears: Mapping[str, LinearGroup]
    cache_groups: Mapping[LayerCache, CacheGroupId]
    """Group of each value of MixerSpec.caches, in the whole model."""
    block_size: int

    def linear(self, name: str, parameters: LayerParameters, kernels: Kernels) -> Linear:
        """Return a group of linear layers of the layer. parameters: packed by these kernels."""
        return Linear(parameters.linears[name], self.linears[name], self.layer, kernels)


class Part(Protocol):
    """A part of a layer."""

    def forward(self, x: torch.Tensor, lora: LoraBatch | None, inputs: MixerInputs) -> torch.Tensor:
        """x [T, hidden] -> [T, hidden]."""
        ...


@runtime_checkable
class EncoderReader(Protocol):
    """A mixer that reads an encoder's output, in every step, from its cache of kind `Cross`."""

    def encode(self, x: torch.Tensor, lora: LoraBatch | None, inputs: MixerInputs) -> None:
        """Write what it keeps of an encoder's output x [T, size] of one input.

        inputs: its batch has the places of these positions; there are no angles and no plans.
        """
        ...


class Mixer(Part, Protocol):
    """A part that mixes positions. It is made of (its spec, place, parameters, kernels)."""

    @property
    def plan_kinds(self) -> Sequence[PlanKind]:
        """Return the kinds of the plans that it reads of MixerInputs."""
        ...
