"""Feed-forward part of one decoder layer."""

import torch

from loraplex.kernels.lora import LoraBatch
from loraplex.kernels.ops import Kernels
from loraplex.models.experts import ExpertFeedForward
from loraplex.models.linear import Linear
from loraplex.models.parameters import LayerParameters
from loraplex.models.spec import DOWN, UP, LayerSpec


def feed_forward(
    spec: LayerSpec, layer: int, parameters: LayerParameters, kernels: Kernels
) -> "DenseFeedForward | ExpertFeedForward":
    """Return the layer's feed-forward part; parameters: packed by these kernels."""
    part = DenseFeedForward if spec.feed_forward.routing is None else ExpertFeedForward
    return part(spec, layer, parameters, kernels)


class DenseFeedForward:
    """down(activation(up(x))), or with a gate down(activation(gate(x)) * up(x))."""

    def __init__(
        self, spec: LayerSpec, layer: int, parameters: LayerParameters, kernels: Kernels
    ) -> None:
        self._activation = spec.feed_forward.activation
        self._activate = kernels.gate if spec.feed_forward.is_gated else kernels.activate
        groups, packed = spec.linears, parameters.linears
        self._up = Linear(packed[UP], groups[UP], layer, kernels)
        self._down = Linear(packed[DOWN], groups[DOWN], layer, kernels)

    def forward(self, x: torch.Tensor, lora: LoraBatch | None) -> torch.Tensor:
        """x [T, hidden] -> [T, hidden]."""
        inner = self._activate(self._up.forward(x, lora), self._activation)
        return self._down.forward(inner, lora)
