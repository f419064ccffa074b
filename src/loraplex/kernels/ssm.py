"""State space of Mamba2: its sizes and gates, and the torch reference (arXiv:2405.21060)."""

from typing import NamedTuple

import torch
from torch.nn import functional

from loraplex.kernels.recurrence import RecurrenceInputs, recurrence
from loraplex.kernels.states import StatePlan


class SsmGates(NamedTuple):
    """What the step size dt of each head and its decay depend on, besides the token."""

    rate: torch.Tensor  # [H] float32: logarithm of the decay for a step of 1, below 0
    dt_bias: torch.Tensor  # [H] float32
    skip: torch.Tensor  # [H] float32: factor of a token's own x in its result
    smallest_dt: float
    largest_dt: float


class SsmShape(NamedTuple):
    """Sizes of one layer."""

    num_heads: int
    head_size: int
    state_size: int
    num_groups: int
    """Groups of neighbouring heads, which share B and C."""
    every: int
    """Positions between states."""

    @property
    def part_sizes(self) -> list[int]:
        """Return the numbers of channels of x, B and C."""
        keys = self.num_groups * self.state_size
        return [self.num_heads * self.head_size, keys, keys]


def ssd(
    xbc: torch.Tensor,
    dt: torch.Tensor,
    gates: SsmGates,
    shape: SsmShape,
    plan: StatePlan,
    chunk: tuple[torch.Tensor, ...],
    states: torch.Tensor,
) -> torch.Tensor:
    """Compute Kernels.ssd with the tensors of its storages."""
    x, keys, queries = torch.split(xbc.float(), shape.part_sizes, dim=1)
    # float64 on the way: the bits of an exponential differ with its place in a tensor.
    steps = functional.softplus(dt.double() + gates.dt_bias.double()).float()
    steps = steps.clamp(gates.smallest_dt, gates.largest_dt)
    heads = x.view(len(x), shape.num_heads, shape.head_size)
    groups = (len(x), shape.num_groups, shape.state_size)
    inputs = RecurrenceInputs(
        query=queries.view(groups),
        key=keys.view(groups),
        value=steps.unsqueeze(2) * heads,
        decay=steps * gates.rate,
        strength=None,
    )
    output = recurrence(inputs, plan, chunk[1:], states, shape.every)
    return (output + gates.skip.unsqueeze(1) * heads).flatten(1).to(xbc.dtype)
