"""The gated feed-forward part of one decoder layer: down(silu(gate(x)) * up(x))."""

import torch

from loraplex.kernels.lora import LoraBatch
from loraplex.kernels.ops import Kernels
from loraplex.models.config import DecoderConfig
from loraplex.models.parameters import LayerParameters

_GATE_UP = ("gate_proj", "up_proj")


class Mlp:
    def __init__(
        self, config: DecoderConfig, layer: int, parameters: LayerParameters, kernels: Kernels
    ) -> None:
        self._layer = layer
        self._kernels = kernels
        self._gate_up = parameters.gate_up
        self._down = parameters.down
        self._gate_up_offsets = (0, config.intermediate_size)

    def forward(self, x: torch.Tensor, lora: LoraBatch | None) -> torch.Tensor:
        """x [T, hidden] -> [T, hidden]."""
        gate_up = self._kernels.linear(x, self._gate_up)
        if lora is not None:
            self._kernels.add_lora(gate_up, x, lora, self._layer, _GATE_UP, self._gate_up_offsets)
        inner = self._kernels.silu_mul(gate_up)
        output = self._kernels.linear(inner, self._down)
        if lora is not None:
            self._kernels.add_lora(output, inner, lora, self._layer, ("down_proj",), (0,))
        return output
