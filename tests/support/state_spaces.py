"""State spaces of random sequences by a backend, and by transformers."""

from collections.abc import Sequence

import torch
from transformers.models.nemotron_h.modeling_nemotron_h import (
    mamba2_chunk_scan,
    mamba2_selective_state_update,
)

from loraplex.kernels.ops import Kernels, Storage
from loraplex.kernels.ssm import SsmGates, SsmShape
from loraplex.kernels.states import StatePlan
from support.stored_positions import RowSpan, StoredPositions, spans_of

EVERY = 8
LENGTHS = (1, EVERY - 1, EVERY, EVERY + 1, 3 * EVERY + 2)
TAPS = 3
"""Width of what the chunk stores first, which is the convolution's."""


class StateSpace:
    """Inputs of sequences, gates, and storages whose unwritten numbers are none."""

    def __init__(
        self,
        shape: SsmShape,
        dtype: torch.dtype = torch.float32,
        limits: tuple[float, float] = (0.0, float("inf")),
        block_size: int = 4,
        lengths: Sequence[int] = LENGTHS,
    ) -> None:
        self.shape = shape
        self.lengths = lengths
        heads, size = shape.num_heads, sum(shape.part_sizes)
        # Views of wider rows.
        self.xbc = [torch.randn(n, size + 3).to(dtype)[:, 1:-2] for n in lengths]
        self.dt = [torch.randn(n, heads + 2).to(dtype)[:, 2:] for n in lengths]
        rates = -torch.randn(heads).exp()
        self.gates = SsmGates(rates, torch.randn(heads), torch.randn(heads), *limits)
        self.positions = StoredPositions(lengths, block_size)
        self.num_states = 1 + sum(length // shape.every for length in lengths)

    def storages(self) -> tuple[Storage, Storage]:
        shape, positions = self.shape, self.positions
        blocks = (positions.num_blocks, positions.block_size)
        values, keys, _ = shape.part_sizes
        chunk = [torch.full((*blocks, n), torch.nan) for n in (TAPS, keys, values, shape.num_heads)]
        state = (self.num_states, shape.num_heads, shape.state_size, shape.head_size)
        return Storage(tuple(chunk)), Storage((torch.full(state, torch.nan),))

    def state(self, sequence: int, position: int) -> int:
        """Return the place of the state after so many positions of a sequence; -1: zero."""
        before = sum(length // self.shape.every for length in self.lengths[:sequence])
        return before + position // self.shape.every if position else -1

    def plan(self, spans: Sequence[RowSpan], num_padding: int, num_empty_rows: int) -> StatePlan:
        rows = self.positions.rows(spans, num_padding, num_empty_rows)
        reads = [
            self.state(sequence, first // self.shape.every * self.shape.every)
            for sequence, first, _ in spans
        ]
        writes = [
            self.state(sequence, position + 1) if (position + 1) % self.shape.every == 0 else -1
            for sequence, first, count in spans
            for position in range(first, first + count)
        ]
        return StatePlan(
            rows.query_start_loc,
            rows.positions,
            torch.tensor(reads + [-1] * num_empty_rows),
            torch.tensor(writes + [-1] * num_padding),
            rows.places,
            rows.table_starts,
            rows.tables,
        )

    def step(
        self,
        kernels: Kernels,
        storages: tuple[Storage, Storage],
        spans: Sequence[RowSpan],
        num_padding: int = 0,
        num_empty_rows: int = 0,
    ) -> torch.Tensor:
        def tokens(inputs: Sequence[torch.Tensor]) -> torch.Tensor:
            own = torch.cat([inputs[row][first : first + count] for row, first, count in spans])
            padded = torch.nn.functional.pad(own, (1, 2, 0, num_padding))
            return padded[:, 1:-2]

        plan = self.plan(spans, num_padding, num_empty_rows)
        xbc, dt = tokens(self.xbc), tokens(self.dt)
        output = kernels.ssd(xbc, dt, self.gates, self.shape, plan, *storages)
        assert output.dtype == xbc.dtype
        assert torch.isfinite(output).all()
        return output[: len(xbc) - num_padding]

    def run(self, kernels: Kernels, cuts: Sequence[int]) -> tuple[list[torch.Tensor], Storage]:
        """Return the results of all sequences cut into chunks of these sizes, and the states."""
        storages = self.storages()
        results: list[list[torch.Tensor]] = [[] for _ in self.lengths]
        for spans in spans_of(self.lengths, cuts):
            output = self.step(kernels, storages, spans)
            counts = [count for *_, count in spans]
            for (sequence, *_), part in zip(spans, torch.split(output, counts), strict=True):
                results[sequence].append(part)
        return list(map(torch.cat, results)), storages[1]

    def parts(self, sequence: int) -> tuple[torch.Tensor, ...]:
        """Return x [1, n, H, P], dt [1, n, H], A [H], B and C [1, n, G, S] of a sequence."""
        shape = self.shape
        xbc = self.xbc[sequence].float().unsqueeze(0)
        x, b, c = torch.split(xbc, shape.part_sizes, dim=2)
        groups = (1, -1, shape.num_groups, shape.state_size)
        heads = (1, -1, shape.num_heads, shape.head_size)
        dt = self.dt[sequence].float().unsqueeze(0)
        return x.reshape(heads), dt, self.gates.rate, b.reshape(groups), c.reshape(groups)

    def by_chunks(self, sequence: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return transformers' results [n, H * P] by chunks, and the last state [H, P, S]."""
        gates = self.gates
        output, state = mamba2_chunk_scan(
            *self.parts(sequence),
            chunk_size=5,
            D=gates.skip,
            dt_bias=gates.dt_bias,
            dt_softplus=True,
            dt_limit=(gates.smallest_dt, gates.largest_dt),
            return_final_states=True,
        )
        return output.flatten(2)[0], state[0]

    def by_steps(self, sequence: int) -> torch.Tensor:
        """Return transformers' results [n, H * P], a step for each position."""
        shape, gates = self.shape, self.gates
        x, dt, a, b, c = self.parts(sequence)
        head = (shape.num_heads, shape.head_size)
        state = torch.zeros(1, *head, shape.state_size)
        outputs = [
            mamba2_selective_state_update(
                state,
                x[:, i],
                dt[:, i, :, None].expand(-1, *head),
                a[:, None, None].expand(*head, shape.state_size),
                b[:, i],
                c[:, i],
                gates.skip[:, None].expand(head),
                dt_bias=gates.dt_bias[:, None].expand(head),
                dt_softplus=True,
            )
            for i in range(x.shape[1])
        ]
        return torch.cat(outputs).flatten(1)
