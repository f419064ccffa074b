"""Feed-forward part of one decoder layer."""

import torch

from loraplex.kernels.lora import LoraBatch
from loraplex.kernels.ops import Kernels
from loraplex.models.experts import ExpertFeedForward
from loraplex.models.mixers.mixer import LayerPlace, MixerInputs, Part
from loraplex.models.parameters import LayerParameters
from loraplex.models.spec import DOWN, UP, FeedForwardSpec


def feed_forward(
    spec: FeedForwardSpec, place: LayerPlace, parameters: LayerParameters, kernels: Kernels
) -> Part:
    """Return the layer's feed-forward part; parameters: packed by these kernels."""
    part = DenseFeedForward if spec.routing is None else ExpertFeedForward
    return part(spec, place, parameters, kernels)


class DenseFeedForward:
    """down(activation(up(x))), or with a gate down(activation(gate(x)) * up(x))."""

    def __init__(
        self,
        spec: FeedForwardSpec,
        place: LayerPlace,
        parameters: LayerParameters,
        kernels: Kernels,
    ) -> None:
        self._activation = spec.activation
        self._activate = kernels.gate if spec.is_gated else kernels.activate
        self._up = place.linear(UP, parameters, kernels)
        self._down = place.linear(DOWN, parameters, kernels)

    def forward(
        self, x: torch.Tensor, lora: LoraBatch | None, _inputs: MixerInputs
    ) -> torch.Tensor:
        """x [T, hidden] -> [T, hidden]."""
        inner = self._activate(self._up.forward(x, lora), self._activation)
        return self._down.forward(inner, lora)
