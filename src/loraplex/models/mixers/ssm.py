"""State space layer of Mamba2: projection, convolution, recurrence, gated norm, projection."""

import torch

from loraplex.kernels.lora import LoraBatch
from loraplex.kernels.ops import Kernels
from loraplex.kernels.ssm import SsmGates, SsmShape
from loraplex.models.linear_group import OutputSpan
from loraplex.models.mixers.mixer import LayerPlace, MixerInputs, taps_by_channel
from loraplex.models.mixers.state_plan import StateKind
from loraplex.models.parameters import LayerParameters
from loraplex.models.specs.part import A_LOG, CONV_WEIGHT, DT_BIAS
from loraplex.models.specs.ssm import (
    CONV_BIAS,
    SKIP,
    SSM_INPUT,
    SSM_NORM,
    SSM_OUTPUT,
    SsmSpec,
)


class Ssm:
    """Implements `Mixer`."""

    def __init__(
        self,
        spec: SsmSpec,
        place: LayerPlace,
        parameters: LayerParameters,
        kernels: Kernels,
    ) -> None:
        chunk, states = spec.caches()
        tensors = parameters.tensors
        self._spec = spec
        self._kernels = kernels
        self._layer = place.layer
        self._input = place.linear(SSM_INPUT, parameters, kernels)
        self._output = place.linear(SSM_OUTPUT, parameters, kernels)
        self._conv_weight = taps_by_channel(tensors[CONV_WEIGHT])
        self._conv_bias = tensors.get(CONV_BIAS)
        self._gates = SsmGates(
            rate=-tensors[A_LOG].exp(),
            dt_bias=tensors[DT_BIAS],
            skip=tensors[SKIP],
            smallest_dt=spec.smallest_dt,
            largest_dt=spec.largest_dt,
        )
        self._shape = SsmShape(
            spec.num_heads, spec.head_size, spec.state_size, spec.num_groups, spec.every
        )
        self._norm = _GatedNorm(spec, parameters, kernels)
        self._kind = StateKind(place.cache_groups[states], place.cache_groups[chunk])
        self.plan_kinds = (self._kind,)

    def forward(self, x: torch.Tensor, lora: LoraBatch | None, inputs: MixerInputs) -> torch.Tensor:
        """x [T, hidden] -> [T, hidden]; writes the chunk's positions, and states at its ends."""
        spec = self._spec
        plan, chunk, states = self._kind.of(inputs, self._layer)
        projected = self._input.forward(x, lora)
        # Views, not copies: every op takes rows with a longer stride.
        sizes = [spec.inner_size, spec.conv_size, spec.num_heads]
        gate, xbc, dt = torch.split(projected, sizes, dim=1)
        xbc = self._kernels.causal_conv(
            xbc, self._conv_weight, self._conv_bias, spec.activation, plan.stored, chunk
        )
        y = self._kernels.ssd(xbc, dt, self._gates, self._shape, plan, chunk, states)
        return self._output.forward(self._norm.apply(y, gate), lora)


class _GatedNorm:
    """Gate and norm of the recurrence's result; a norm over the heads of several ranks gathers."""

    def __init__(self, spec: SsmSpec, parameters: LayerParameters, kernels: Kernels) -> None:
        num_groups = spec.num_groups if spec.own_groups is None else spec.own_groups.whole
        heads = OutputSpan(0, spec.num_heads) if spec.own_heads is None else spec.own_heads.span
        weight = parameters.norms[SSM_NORM].weight.view(num_groups, -1)
        self._kernels = kernels
        self._eps = spec.norm.eps
        self._size = spec.norm.size
        self._group_size = self._size // num_groups
        self._own = slice(heads.first * spec.head_size, heads.end * spec.head_size)
        self._gathers = spec.inner_size % self._group_size != 0
        groups = slice(self._own.start // self._group_size, self._own.stop // self._group_size)
        self._weight = weight if self._gathers else weight[groups]

    def apply(self, y: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """y, gate [T, inner] -> [T, inner]."""
        if self._gathers:
            y, gate = (self._kernels.gather_columns(each, self._size) for each in (y, gate))
        groups = (len(y), -1, self._group_size)
        normed = self._kernels.gated_rms_norm(
            y.view(groups), gate.view(groups), self._weight, self._eps, is_gated_first=True
        ).flatten(1)
        return normed[:, self._own] if self._gathers else normed
