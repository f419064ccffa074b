"""Norms of decoders, each fused with the addition to the residual that precedes it."""

import dataclasses
from typing import NamedTuple, Protocol

import torch

from loraplex.kernels.ops import Kernels
from loraplex.models.parameters import NormParameters
from loraplex.models.spec import NormKind, NormSpec


class HiddenState(NamedTuple):
    """Hidden state between the parts of a decoder: residual + update.

    The addition is left to the norm that reads the state, because one kernel does both.
    """

    residual: torch.Tensor  # [T, hidden]
    update: torch.Tensor | None  # [T, hidden]; None: the residual is the whole state


class Norm(Protocol):
    def read(self, state: HiddenState) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (norm of the state, the state in one tensor), each [T, N]."""
        ...


def make_norm(norm: NormSpec, parameters: NormParameters, kernels: Kernels) -> Norm:
    if norm.kind is NormKind.RMS:
        return RmsNorm(parameters.weight, norm.eps, kernels)
    assert parameters.bias is not None
    return LayerNorm(parameters.weight, parameters.bias, norm.eps, kernels)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class RmsNorm:
    """Implements `Norm`."""

    weight: torch.Tensor
    eps: float
    kernels: Kernels

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, N] or [T, H, N] -> the same shape."""
        return self.kernels.rms_norm(x, self.weight, self.eps)

    def read(self, state: HiddenState) -> tuple[torch.Tensor, torch.Tensor]:
        residual, update = state
        if update is None:
            return self.apply(residual), residual
        return self.kernels.add_rms_norm(update, residual, self.weight, self.eps)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class LayerNorm:
    """Implements `Norm`."""

    weight: torch.Tensor
    bias: torch.Tensor
    eps: float
    kernels: Kernels

    def read(self, state: HiddenState) -> tuple[torch.Tensor, torch.Tensor]:
        residual, update = state
        if update is None:
            return self.kernels.layer_norm(residual, self.weight, self.bias, self.eps), residual
        return self.kernels.add_layer_norm(update, residual, self.weight, self.bias, self.eps)
