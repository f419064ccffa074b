"""What mixers of all kinds have in common: how one is made, and what it reads of a step."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import torch

from loraplex.core.plan import CacheGroupId
from loraplex.kernels.lora import LoraBatch
from loraplex.kernels.ops import Kernels, Storage
from loraplex.models.batch import ForwardBatch
from loraplex.models.linear import Linear
from loraplex.models.linear_group import LinearGroup
from loraplex.models.parameters import LayerParameters
from loraplex.models.specs.part import LayerCache, RopeConfig

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
