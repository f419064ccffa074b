"""Gated delta rule of one decoder layer: projections, convolution, recurrence, gated norm."""

import itertools
import math
from collections.abc import Iterator, Sequence

import torch

from loraplex.kernels.delta import DeltaGates, DeltaShape
from loraplex.kernels.lora import LoraBatch
from loraplex.kernels.ops import Kernels
from loraplex.models.mixers.head_order import HeadOrder
from loraplex.models.mixers.mixer import LayerPlace, MixerInputs, PlanKind, taps_by_channel
from loraplex.models.mixers.state_plan import StateKind
from loraplex.models.parameters import LayerParameters
from loraplex.models.specs.delta import (
    DELTA_GATES,
    DELTA_IN,
    DELTA_OUT,
    OUTPUT_NORM,
    DeltaSpec,
)
from loraplex.models.specs.part import A_LOG, CONV_WEIGHT, DT_BIAS


class Delta:
    """Implements `Mixer`."""

    def __init__(
        self,
        spec: DeltaSpec,
        place: LayerPlace,
        parameters: LayerParameters,
        kernels: Kernels,
    ) -> None:
        chunk, states = spec.caches()
        self._spec = spec
        self._kernels = kernels
        self._layer = place.layer
        self._inputs = place.linear(DELTA_IN, parameters, kernels)
        self._gate_inputs = place.linear(DELTA_GATES, parameters, kernels)
        self._output = place.linear(DELTA_OUT, parameters, kernels)
        self._conv_weight = taps_by_channel(parameters.tensors[CONV_WEIGHT])
        self._gates = DeltaGates(parameters.tensors[A_LOG], parameters.tensors[DT_BIAS])
        self._norm_weight = parameters.norms[OUTPUT_NORM].weight
        self._shape = DeltaShape(
            spec.num_key_heads, spec.num_value_heads, spec.key_size, spec.value_size, spec.every
        )
        self._kind = StateKind(place.cache_groups[states], place.cache_groups[chunk])
        self._orders: tuple[tuple[int, HeadOrder], ...] = ()
        if spec.is_grouped:
            gate_sizes = (spec.values_per_key, spec.values_per_key)
            self._orders = tuple(
                _unit_order(each, spec.num_key_heads) for each in (spec.head_sizes, gate_sizes)
            )
        self.plan_kinds: tuple[PlanKind, ...] = (
            self._kind,
            *(order for _, order in self._orders),
        )

    def forward(self, x: torch.Tensor, lora: LoraBatch | None, inputs: MixerInputs) -> torch.Tensor:
        """x [T, hidden] -> [T, hidden]; stores the positions, and the states of borders."""
        spec, kernels = self._spec, self._kernels
        plan, chunk, states = self._kind.of(inputs, self._layer)
        projected = self._inputs.forward(x, lora)
        gates = self._gate_inputs.forward(x, lora)
        if self._orders:
            projected, gates = self._ordered((projected, gates), inputs)
        # Views, not copies: every op takes rows with a longer stride.
        qkv, z = projected[:, : spec.conv_size], projected[:, spec.conv_size :]
        b, a = gates[:, : spec.num_value_heads], gates[:, spec.num_value_heads :]
        mixed = kernels.causal_conv(
            qkv, self._conv_weight, None, spec.activation, plan.stored, chunk
        )
        read = kernels.delta_rule(mixed, b, a, self._gates, self._shape, plan, chunk, states)
        heads = (len(x), spec.num_value_heads, spec.value_size)
        normed = kernels.gated_rms_norm(
            *(read.view(heads), z.view(heads), self._norm_weight, spec.norm.eps),
            is_gated_first=False,
        )
        return self._output.forward(normed.flatten(1), lora)

    def _ordered(
        self, outputs: Sequence[torch.Tensor], inputs: MixerInputs
    ) -> Iterator[torch.Tensor]:
        """Bring outputs [T, N] that lie by key head into the order of their parts."""
        for each, (size, order) in zip(outputs, self._orders, strict=True):
            rows = inputs.plans[order]
            assert isinstance(rows, torch.Tensor)
            yield self._kernels.take_rows(each.view(-1, size), rows).view(each.shape)


def _unit_order(sizes: Sequence[int], num_heads: int) -> tuple[int, HeadOrder]:
    """Return (size of a unit, order of units) that turns head, part into part, head.

    sizes: of a head's parts, each a multiple of the unit.
    """
    unit = math.gcd(*sizes)
    numbers = [size // unit for size in sizes]
    firsts = itertools.accumulate(numbers, initial=0)
    order = tuple(
        head * sum(numbers) + first + index
        for first, number in zip(firsts, numbers, strict=False)
        for head in range(num_heads)
        for index in range(number)
    )
    return unit, HeadOrder(order)
