"""Linear recurrences with decay, as one formula for each position: the torch reference.

A sequence is cut at borders, every so many positions. With S the state at the last border, G the
sum of decays since, and for each position since the border its key k and what was written for it w:

    w_i = strength_i * (value_i - e^G_i S^T k_i - sum over j < i of e^(G_i - G_j) (k_j . k_i) w_j)
    output_i = e^G_i S^T q_i + sum over j <= i of e^(G_i - G_j) (k_j . q_i) w_j
    S' = e^G S + sum over j of e^(G - G_j) k_j w_j^T, at the next border

Without strengths w_i = value_i. A step form that rewrites the state would have other bits than this
one (ADR 60).
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch

from loraplex.kernels.states import StatePlan


class RecurrenceInputs(NamedTuple):
    """Inputs of T tokens in float32. Hv value heads share Hk query and key heads."""

    query: torch.Tensor  # [T, Hk, dk]
    key: torch.Tensor  # [T, Hk, dk]
    value: torch.Tensor  # [T, Hv, dv]
    decay: torch.Tensor  # [T, Hv]: the logarithm of the factor, at most 0
    strength: torch.Tensor | None  # [T, Hv]


def recurrence(
    inputs: RecurrenceInputs,
    plan: StatePlan,
    positions: Sequence[torch.Tensor],
    states: torch.Tensor,
    every: int,
) -> torch.Tensor:
    """Return the outputs [T, Hv, dv] float32; those of padding are 0.

    positions: where keys [Hk * dk], written values [Hv * dv] and sums of decays [Hv] of the
    positions since the last border are stored, each [num_blocks, block_size, ...]; those of the
    step are written to plan.places, and states [num_blocks, Hv, dk, dv] to plan.writes.
    """
    output = torch.zeros_like(inputs.value)
    written: list[tuple[int, torch.Tensor]] = []
    for row, (first, end) in enumerate(itertools.pairwise(plan.query_start_loc.tolist())):
        if first < end:
            work = _Row(inputs, plan, row, first, positions, states, every)
            for token in range(first, end):
                output[token] = work.advance(token)
                if work.is_at_border:
                    state, target = work.pass_border(), int(plan.writes[token])
                    if target >= 0:
                        written.append((target, state))
    for target, state in written:
        states[target] = state
    return output


class _Row:
    """One row between two borders. Sums are in float64, so they do not depend on its place."""

    def __init__(
        self,
        inputs: RecurrenceInputs,
        plan: StatePlan,
        row: int,
        first: int,
        positions: Sequence[torch.Tensor],
        states: torch.Tensor,
        every: int,
    ) -> None:
        """first: token with which the row begins."""
        self._inputs = inputs
        self._places = plan.places
        self._every = every
        self._num_keys, self._key_size = inputs.key.shape[1:]
        self._num_values, self._value_size = inputs.value.shape[1:]
        # [positions of all blocks, ...]
        self._stored = [tensor.flatten(0, 1) for tensor in positions]
        state = int(plan.reads[row])
        self._state = torch.zeros_like(states[0]) if state < 0 else states[state].clone()
        start = int(plan.positions[first])
        self._offset = start % every
        self._tail = [torch.zeros_like(tensor[:1]).repeat(every, 1) for tensor in self._stored]
        block_size = positions[0].shape[1]
        since = torch.arange(start - self._offset, start, device=states.device)
        entries = int(plan.table_starts[row]) + since // block_size
        places = plan.tables[entries].long() * block_size + since % block_size
        for tail, stored in zip(self._tail, self._stored, strict=True):
            tail[: self._offset] = stored[places]

    @property
    def is_at_border(self) -> bool:
        return self._offset == self._every

    def advance(self, token: int) -> torch.Tensor:
        """Compute the next position; return its output [Hv, dv]."""
        inputs, offset = self._inputs, self._offset
        keys, written, sums = self._tail
        before = sums[offset - 1] if offset else torch.zeros_like(sums[0])
        sums[offset] = before + inputs.decay[token]
        keys[offset] = inputs.key[token].flatten()
        value = inputs.value[token].double()
        if inputs.strength is not None:
            found = self._read(inputs.key[token])
            value = inputs.strength[token].double()[:, None] * (value - found)
        written[offset] = value.float().flatten()
        output = self._read(inputs.query[token]).float()
        place = int(self._places[token])
        if place >= 0:
            for tail, stored in zip(self._tail, self._stored, strict=True):
                stored[place] = tail[offset]
        self._offset += 1
        return output

    def pass_border(self) -> torch.Tensor:
        """Return the state [Hv, dk, dv] at the border, and begin after it."""
        keys, written, sums = self._tail
        last = sums[-1].double()
        factors = torch.exp(last - sums.double())  # [every, Hv]
        added = torch.einsum(
            "jhk,jh,jhv->hkv", self._keys_of_values(), factors, self._written().double()
        )
        decayed = torch.exp(last)[:, None, None] * self._state.double()
        self._state = (decayed + added).float()
        self._offset = 0
        for tail in (keys, written, sums):
            tail.zero_()
        return self._state

    def _read(self, query: torch.Tensor) -> torch.Tensor:
        """Return what a query [Hk, dk] reads [Hv, dv] float64. Later positions are zeros yet."""
        sums = self._tail[2].double()
        wide = self._of_values(query.double())
        factors = torch.exp(sums[self._offset] - sums)
        products = torch.einsum("jhk,hk->jh", self._keys_of_values(), wide) * factors
        recent = torch.einsum("jh,jhv->hv", products, self._written().double())
        old = torch.einsum("hkv,hk->hv", self._state.double(), wide)
        return torch.exp(sums[self._offset])[:, None] * old + recent

    def _keys_of_values(self) -> torch.Tensor:
        """Return the keys [every, Hv, dk] float64 of the value heads."""
        keys = self._tail[0].view(self._every, self._num_keys, self._key_size)
        return self._of_values(keys.double())

    def _of_values(self, heads: torch.Tensor) -> torch.Tensor:
        """[..., Hk, dk] -> [..., Hv, dk]."""
        return heads.repeat_interleave(self._num_values // self._num_keys, dim=-2)

    def _written(self) -> torch.Tensor:
        return self._tail[1].view(self._every, self._num_values, self._value_size)
