"""Gated causal convolution of one decoder layer, between two linear layers."""

import torch

from loraplex.kernels.lora import LoraBatch
from loraplex.kernels.ops import Kernels
from loraplex.kernels.states import StoredRows
from loraplex.models.mixers.mixer import LayerPlace, MixerInputs, taps_by_channel
from loraplex.models.mixers.state_plan import StoredKind
from loraplex.models.parameters import LayerParameters
from loraplex.models.specs.convolution import BIAS, CONV_IN, CONV_OUT, TAPS, ConvSpec


class Convolution:
    """Implements `Mixer`."""

    def __init__(
        self, spec: ConvSpec, place: LayerPlace, parameters: LayerParameters, kernels: Kernels
    ) -> None:
        (cache,) = spec.caches()
        self._kernels = kernels
        self._layer = place.layer
        self._in = place.linear(CONV_IN, parameters, kernels)
        self._out = place.linear(CONV_OUT, parameters, kernels)
        self._taps = taps_by_channel(parameters.tensors[TAPS])
        self._bias = parameters.tensors.get(BIAS)
        self._kind = StoredKind(place.cache_groups[cache])
        self.plan_kinds = (self._kind,)

    def forward(self, x: torch.Tensor, lora: LoraBatch | None, inputs: MixerInputs) -> torch.Tensor:
        """x [T, hidden] -> [T, hidden]; writes the tokens' inputs of the convolution."""
        storage = inputs.storages[self._kind.cache_group][self._layer]
        rows = inputs.plans[self._kind]
        assert storage is not None
        assert isinstance(rows, StoredRows)
        before, after, x = self._in.forward(x, lora).chunk(3, dim=1)
        given = self._kernels.multiply(x, before)
        mixed = self._kernels.causal_conv(given, self._taps, self._bias, None, rows, storage)
        return self._out.forward(self._kernels.multiply(mixed, after), lora)
