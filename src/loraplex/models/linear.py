"""Groups of linear layers as a decoder layer runs them: the base's product, then LoRA."""

import torch

from loraplex.kernels.lora import LoraBatch
from loraplex.kernels.ops import Kernels, PackedLinear
from loraplex.kernels.routing import Routes
from loraplex.models.linear_group import LinearGroup


class Linear:
    def __init__(
        self, packed: PackedLinear, group: LinearGroup, layer: int, kernels: Kernels
    ) -> None:
        """packed: by these kernels, from the layers of the group."""
        self._packed = packed
        self._layer = layer
        self._kernels = kernels
        self._modules = group.modules
        self._first_outputs = group.first_outputs
        self._num_blocks = group.input_blocks

    def forward(self, x: torch.Tensor, lora: LoraBatch | None) -> torch.Tensor:
        """x [T, in] -> [T, out]."""
        y = self._kernels.linear(x, self._packed)
        if lora is not None:
            places = (self._modules, self._first_outputs)
            self._kernels.add_lora(y, x, lora, self._layer, *places, self._num_blocks)
        return y

    def forward_pairs(
        self, x: torch.Tensor, lora: LoraBatch | None, routes: Routes
    ) -> torch.Tensor:
        """x [T, in] or [T * k, in] -> [T * k, out], for a group of experts."""
        y = self._kernels.grouped_linear(x, self._packed, routes)
        if lora is not None:
            places = (self._layer, self._modules, self._first_outputs)
            self._kernels.add_expert_lora(y, x, lora, routes, *places, self._num_blocks)
        return y
