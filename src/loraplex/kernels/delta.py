"""Gated delta rule: its sizes and gates, and the torch reference (arXiv:2412.06464)."""

from typing import Final, NamedTuple

import torch
from torch.nn import functional

from loraplex.kernels.recurrence import RecurrenceInputs, recurrence
from loraplex.kernels.states import StatePlan

LENGTH_FLOOR: Final = 1e-6
"""Addend of the sum of squares by whose root keys and queries are divided."""


class DeltaGates(NamedTuple):
    """Numbers of each value head."""

    a_log: torch.Tensor  # [Hv] float32
    dt_bias: torch.Tensor  # [Hv] float32


class DeltaShape(NamedTuple):
    """Sizes of one layer."""

    num_key_heads: int
    num_value_heads: int
    key_size: int
    value_size: int
    every: int
    """Positions between states."""

    @property
    def part_sizes(self) -> tuple[int, int, int]:
        """Return the numbers of channels of q, k and v."""
        keys = self.num_key_heads * self.key_size
        return keys, keys, self.num_value_heads * self.value_size


def delta_rule(
    qkv: torch.Tensor,
    b: torch.Tensor,
    a: torch.Tensor,
    gates: DeltaGates,
    shape: DeltaShape,
    plan: StatePlan,
    chunk: tuple[torch.Tensor, ...],
    states: torch.Tensor,
) -> torch.Tensor:
    """Compute Kernels.delta_rule with the tensors of its storages."""
    query, key, value = (part.double() for part in torch.split(qkv, list(shape.part_sizes), dim=1))
    decay = -gates.a_log.double().exp() * functional.softplus(a.double() + gates.dt_bias.double())
    inputs = RecurrenceInputs(
        query=_unit_rows(query, shape) * shape.key_size**-0.5,
        key=_unit_rows(key, shape),
        value=value.view(len(qkv), shape.num_value_heads, shape.value_size),
        decay=decay,
        # Rounded to the model's type, as its layers do.
        strength=torch.sigmoid(b.double()).to(b.dtype),
    )
    narrow = RecurrenceInputs._make(each if each is None else each.float() for each in inputs)
    output = recurrence(narrow, plan, chunk[1:], states, shape.every)
    return output.flatten(1).to(qkv.dtype)


def _unit_rows(vectors: torch.Tensor, shape: DeltaShape) -> torch.Tensor:
    """[T, Hk * dk] float64 -> [T, Hk, dk], each vector divided by its length."""
    heads = vectors.view(len(vectors), shape.num_key_heads, shape.key_size)
    return heads * torch.rsqrt(heads.square().sum(-1, keepdim=True) + LENGTH_FLOOR)
