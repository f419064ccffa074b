"""The two norms of decoders, each with the addition that comes before it."""

import dataclasses
from typing import Protocol

import torch

from loraplex.kernels.ops import Kernels
from loraplex.models.parameters import NormParameters


class Norm(Protocol):
    def apply(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, N] -> [T, N]."""
        ...

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm of x + residual, x + residual), each [T, N]."""
        ...


def make_norm(parameters: NormParameters, eps: float, kernels: Kernels) -> Norm:
    """A layer norm is one that has a bias."""
    if parameters.bias is None:
        return RmsNorm(parameters.weight, eps, kernels)
    return LayerNorm(parameters.weight, parameters.bias, eps, kernels)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class RmsNorm:
    """Implements `Norm`; x may be [T, H, N], too."""

    weight: torch.Tensor
    eps: float
    kernels: Kernels

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        return self.kernels.rms_norm(x, self.weight, self.eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.kernels.add_rms_norm(x, residual, self.weight, self.eps)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class LayerNorm:
    """Implements `Norm`."""

    weight: torch.Tensor
    bias: torch.Tensor
    eps: float
    kernels: Kernels

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        return self.kernels.layer_norm(x, self.weight, self.bias, self.eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.kernels.add_layer_norm(x, residual, self.weight, self.bias, self.eps)
