"""Mixer of a kind that only tests have, and a decoder with layers of all sorts."""

import dataclasses
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Self

import torch

from loraplex.core.weight_precision import WeightPrecision
from loraplex.kernels.activations import Activation
from loraplex.kernels.lora import LoraBatch
from loraplex.kernels.ops import Kernels, PackedLinear
from loraplex.models.batch import ForwardBatch
from loraplex.models.linear_group import LinearGroup, TensorShard, share_of
from loraplex.models.mixers.mixer import LayerPlace, MixerInputs
from loraplex.models.norm import make_norm
from loraplex.models.parameters import LayerParameters, LinearPlace
from loraplex.models.spec import LayerSpec, NormPlace
from loraplex.models.specs.part import (
    Divided,
    LayerCache,
    MixerSpec,
    NormSpec,
    RopeConfig,
    Split,
    TensorSpec,
)

IN, OUT = "toy_in", "toy_out"
PERIOD = 3


class WholeSpec(MixerSpec):
    """Base of toys without tensors of their own, which each rank has whole."""

    __slots__ = ()

    def tensors(self) -> Mapping[str, NormSpec | TensorSpec]:
        return {}

    def ropes(self) -> Mapping[RopeConfig, int]:
        return {}

    def divisors(self) -> Sequence[Divided]:
        return ()

    def shard(self, place: TensorShard) -> tuple[Self, Mapping[str, Split]]:
        del place
        return self, {}


@dataclasses.dataclass(frozen=True, slots=True)
class ToySpec(MixerSpec):
    """out(silu(in(x))), then a norm, then a row of a table by the position."""

    hidden: int
    units: int
    prefix: str

    def caches(self) -> Sequence[LayerCache]:
        return ()

    def tensors(self) -> Mapping[str, NormSpec | TensorSpec]:
        return {
            "toy_norm": NormSpec(f"{self.prefix}norm", self.hidden, 1e-6),
            "toy_table": TensorSpec(f"{self.prefix}table", (PERIOD, self.hidden)),
        }

    def ropes(self) -> Mapping[RopeConfig, int]:
        return {}

    def divisors(self) -> Sequence[Divided]:
        return (Divided(f"{self.units} toy units", self.units),)

    def shard(self, place: TensorShard) -> tuple[Self, Mapping[str, Split]]:
        own = share_of(self.units, *place)
        splits = {IN: Split(outputs=[own]), OUT: Split(inputs=own)}
        return dataclasses.replace(self, units=own.size), splits

    def step_bytes(self, itemsize: int) -> int:
        return self.units * itemsize


class TableRows(NamedTuple):
    """Kind of plan: the rows of the table. Counts how often it is planned."""

    period: int
    counts: list[int]

    def __hash__(self) -> int:
        return hash(self.period)

    def planner(
        self, _kernels: Kernels, _device: torch.device
    ) -> Callable[[ForwardBatch], torch.Tensor]:
        def plan(batch: ForwardBatch) -> torch.Tensor:
            self.counts.append(len(batch.token_ids))
            return batch.positions % self.period

        return plan


planned: list[int] = []
"""Number of tokens of each step that was planned."""


class Toy:
    """Implements `Mixer`."""

    def __init__(
        self, spec: ToySpec, place: LayerPlace, parameters: LayerParameters, kernels: Kernels
    ) -> None:
        self._kernels = kernels
        self._in = place.linear(IN, parameters, kernels)
        self._out = place.linear(OUT, parameters, kernels)
        norm = spec.tensors()["toy_norm"]
        assert isinstance(norm, NormSpec)
        self._norm = make_norm(norm, parameters.norms["toy_norm"], kernels)
        self._table = parameters.tensors["toy_table"]
        self._kind = TableRows(PERIOD, planned)
        self.plan_kinds = (self._kind,)

    def forward(self, x: torch.Tensor, lora: LoraBatch | None, inputs: MixerInputs) -> torch.Tensor:
        inner = self._kernels.activate(self._in.forward(x, lora), Activation.SILU)
        normed = self._norm.apply(self._out.forward(inner, lora))
        rows = inputs.plans[self._kind]
        assert isinstance(rows, torch.Tensor)
        return self._kernels.add(normed, self._kernels.take_rows(self._table, rows))


def toy_layer(layer: LayerSpec, units: int, prefix: str) -> LayerSpec:
    """Return the layer with a toy in the place of its mixer. prefix: of the toy's tensors."""
    hidden = layer.norms[NormPlace.BEFORE_MIXER].size
    groups = {
        name: LinearGroup(
            paths=(f"{prefix}{name}",),
            outputs={name: outputs},
            in_features=inputs,
            has_bias=False,
            is_row=name == OUT,
        )
        for name, inputs, outputs in ((IN, hidden, units), (OUT, units, hidden))
    }
    rest = {name: group for name, group in layer.linears.items() if name in ("up", "down")}
    return dataclasses.replace(
        layer, mixer=ToySpec(hidden, units, prefix), linears={**groups, **rest}
    )


def mixer_alone(layer: LayerSpec) -> LayerSpec:
    """Return the layer without its feed-forward part."""
    return dataclasses.replace(_without(layer, "FEED_FORWARD", "up", "down"), feed_forward=None)


def feed_forward_alone(layer: LayerSpec) -> LayerSpec:
    """Return the layer without its mixer."""
    return dataclasses.replace(_without(layer, "MIXER", "qkv", "o", IN, OUT), mixer=None)


def _without(layer: LayerSpec, part: str, *groups: str) -> LayerSpec:
    """Return the layer without a part's norms and these groups of linear layers."""
    return dataclasses.replace(
        layer,
        norms={place: norm for place, norm in layer.norms.items() if part not in place.name},
        linears={name: group for name, group in layer.linears.items() if name not in groups},
    )


class RandomWeights:
    """Implements ParameterSource: a tensor's values depend on its name alone."""

    def __init__(self, kernels: Kernels, added: Mapping[str, torch.Tensor] | None = None) -> None:
        """added: what is added to weights [out, in], by the layers' names."""
        self._kernels = kernels
        self._added = added or {}

    def tensor(
        self, name: str, shape: tuple[int, ...], num_rows: int | None = None
    ) -> torch.Tensor:
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        return 0.3 * torch.randn(shape, generator=generator)[:num_rows]

    def linear(self, place: LinearPlace) -> PackedLinear:
        if place.is_embedding:
            return None
        weights = (
            self.tensor(part, (size, place.in_features)) + self._added.get(part, 0.0)
            for part, size in place.parts.items()
        )
        own = torch.cat([place.own_weight(part, weight) for part, weight in enumerate(weights)])
        precision = WeightPrecision.NATIVE
        return self._kernels.pack_linear(own, None, precision, place.num_blocks)
