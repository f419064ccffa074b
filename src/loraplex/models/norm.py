"""Norms of decoders, each fused with the addition to the residual that precedes it."""

import dataclasses
from typing import NamedTuple, Protocol

import torch

from loraplex.kernels.ops import Kernels
from loraplex.models.parameters import NormParameters
from loraplex.models.specs.part import NormKind, NormSpec


class HiddenState(NamedTuple):
    """Hidden state between the parts of a decoder: residual + factor * update.

    The addition is left to the norm that reads the state, because one kernel does both.
    """

    residual: torch.Tensor  # [T, hidden]
    update: torch.Tensor | None  # [T, hidden]; None: the residual is the whole state
    factor: float = 1.0
    """Factor of the update."""


class Norm(Protocol):
    def apply(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, N] or [T, H, N] -> the same shape."""
        ...

    def read(self, state: HiddenState) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (norm of the state, residual from there on), each [T, N]."""
        ...


def make_norm(norm: NormSpec | None, parameters: NormParameters | None, kernels: Kernels) -> Norm:
    if norm is None or parameters is None:
        return NoNorm(kernels)
    if norm.kind is NormKind.RMS:
        made: Norm = RmsNorm(parameters.weight, norm.eps, kernels)
    else:
        assert parameters.bias is not None
        made = LayerNorm(parameters.weight, parameters.bias, norm.eps, kernels)
    return PostNorm(made) if norm.replaces_residual else made


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class NoNorm:
    """Implements `Norm` for a place that has none."""

    kernels: Kernels

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def read(self, state: HiddenState) -> tuple[torch.Tensor, torch.Tensor]:
        residual, update, factor = state
        total = residual if update is None else self.kernels.add(update, residual, factor)
        return total, total


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class PostNorm:
    """Implements `Norm` for one whose output replaces the residual."""

    norm: Norm

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm.apply(x)

    def read(self, state: HiddenState) -> tuple[torch.Tensor, torch.Tensor]:
        normed, _ = self.norm.read(state)
        return normed, normed


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class RmsNorm:
    """Implements `Norm`."""

    weight: torch.Tensor
    eps: float
    kernels: Kernels

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        return self.kernels.rms_norm(x, self.weight, self.eps)

    def read(self, state: HiddenState) -> tuple[torch.Tensor, torch.Tensor]:
        residual, update, factor = state
        if update is None:
            return self.apply(residual), residual
        return self.kernels.add_rms_norm(update, residual, self.weight, self.eps, factor)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class LayerNorm:
    """Implements `Norm`."""

    weight: torch.Tensor
    bias: torch.Tensor
    eps: float
    kernels: Kernels

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        return self.kernels.layer_norm(x, self.weight, self.bias, self.eps)

    def read(self, state: HiddenState) -> tuple[torch.Tensor, torch.Tensor]:
        residual, update, factor = state
        if update is None:
            return self.apply(residual), residual
        return self.kernels.add_layer_norm(
            update, residual, self.weight, self.bias, self.eps, factor
        )
