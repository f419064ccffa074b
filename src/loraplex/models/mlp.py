"""The feed-forward part of one decoder layer: with a gate, or with an activation alone."""

from typing import Protocol

import torch

from loraplex.kernels.activations import Activation
from loraplex.kernels.lora import LoraBatch
from loraplex.kernels.ops import Kernels
from loraplex.models.activations import ACTIVATIONS
from loraplex.models.config import DecoderConfig
from loraplex.models.layer_linears import layer_linears
from loraplex.models.linear import Linear
from loraplex.models.parameters import LayerParameters


class Mlp(Protocol):
    def forward(self, x: torch.Tensor, lora: LoraBatch | None) -> torch.Tensor:
        """x [T, hidden] -> [T, hidden]."""
        ...


def make_mlp(
    config: DecoderConfig, layer: int, parameters: LayerParameters, kernels: Kernels
) -> Mlp:
    linears = layer_linears(config)
    up = Linear(parameters.up, linears.up, layer, kernels)
    down = Linear(parameters.down, linears.down, layer, kernels)
    if config.has_gate:
        return GatedMlp(up, down, kernels)
    return PlainMlp(up, ACTIVATIONS[config.hidden_act], down, kernels)


class GatedMlp:
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, gate_up: Linear, down: Linear, kernels: Kernels) -> None:
        self._gate_up = gate_up
        self._down = down
        self._kernels = kernels

    def forward(self, x: torch.Tensor, lora: LoraBatch | None) -> torch.Tensor:
        """x [T, hidden] -> [T, hidden]."""
        gate_up = self._gate_up.forward(x, lora)
        return self._down.forward(self._kernels.silu_mul(gate_up), lora)


class PlainMlp:
    """down(activation(up(x)))."""

    def __init__(self, up: Linear, activation: Activation, down: Linear, kernels: Kernels) -> None:
        self._up = up
        self._activation = activation
        self._down = down
        self._kernels = kernels

    def forward(self, x: torch.Tensor, lora: LoraBatch | None) -> torch.Tensor:
        """x [T, hidden] -> [T, hidden]."""
        inner = self._kernels.activate(self._up.forward(x, lora), self._activation)
        return self._down.forward(inner, lora)
