"""Gated delta rules of random sequences by a backend, and by transformers."""

import dataclasses
from collections.abc import Sequence

import torch
from torch.nn import functional
from transformers.models.qwen3_5 import modeling_qwen3_5

from loraplex.kernels.delta import DeltaGates, DeltaShape
from loraplex.kernels.ops import Kernels, Storage
from loraplex.kernels.states import StatePlan
from support.stored_positions import RowSpan, StoredPositions, spans_of

BLOCK_SIZE = 4
LENGTHS = (1, 15, 16, 17, 50)


class Case:
    """Random inputs of sequences."""

    def __init__(
        self,
        shape: DeltaShape,
        dtype: torch.dtype = torch.float32,
        lengths: Sequence[int] = LENGTHS,
    ) -> None:
        torch.default_generator.manual_seed(3)
        num_values, total = shape.num_value_heads, sum(lengths)
        self.shape = shape
        self.gates = DeltaGates(torch.randn(num_values), torch.randn(num_values))
        made = (
            torch.split(torch.randn(total, size).to(dtype), list(lengths))
            for size in (sum(shape.part_sizes), num_values, num_values)
        )
        self.inputs = list(zip(*made, strict=True))
        """qkv, b and a of each sequence."""

    @property
    def lengths(self) -> list[int]:
        return [len(qkv) for qkv, *_ in self.inputs]


@dataclasses.dataclass
class Computed:
    outputs: list[torch.Tensor]
    states: dict[tuple[int, int], torch.Tensor]
    """States that were written, by sequence and number of positions."""


class Rows:
    """Plans of steps, in which each border of a sequence has a block of its own."""

    def __init__(self, case: Case) -> None:
        self.positions = StoredPositions(case.lengths, BLOCK_SIZE)
        self.every = case.shape.every
        self.blocks: dict[tuple[int, int], int] = {}
        for sequence, length in enumerate(case.lengths):
            for border in range(self.every, length + 1, self.every):
                self.blocks[sequence, border] = len(self.blocks)

    def plan(self, spans: Sequence[RowSpan], num_padding: int, *, has_gaps: bool) -> StatePlan:
        """has_gaps: a row writes the last state that it completes, and no other."""
        stored = self.positions.rows(spans, num_padding, num_empty_rows=1)
        reads, writes = [], []
        for sequence, first, num_tokens in spans:
            reads.append(self.blocks.get((sequence, first // self.every * self.every), -1))
            ends = range(first + 1, first + num_tokens + 1)
            last = ends[-1] // self.every * self.every
            writes += [
                self.blocks.get((sequence, end), -1) if end == last or not has_gaps else -1
                for end in ends
            ]
        return StatePlan(
            stored.query_start_loc,
            stored.positions,
            torch.tensor([*reads, -1]),
            torch.tensor(writes + [-1] * num_padding),
            *(stored.places, stored.table_starts, stored.tables),
        )


def compute(
    kernels: Kernels,
    case: Case,
    cuts: Sequence[int],
    *,
    has_gaps: bool = False,
    num_padding: int = 0,
) -> Computed:
    """Compute all sequences together, in chunks of these sizes by turns."""
    rows, shape = Rows(case), case.shape
    keys, _, values = shape.part_sizes
    sizes = (1, keys, values, shape.num_value_heads)
    shape_of = (rows.positions.num_blocks, BLOCK_SIZE)
    # What no step wrote is never read.
    chunk = Storage(tuple(torch.full((*shape_of, size), torch.nan) for size in sizes))
    heads = (shape.num_value_heads, shape.key_size, shape.value_size)
    states = Storage((torch.full((max(1, len(rows.blocks)), *heads), torch.nan),))
    outputs: list[list[torch.Tensor]] = [[] for _ in case.lengths]
    for spans in spans_of(case.lengths, cuts):
        parts = [
            torch.cat([case.inputs[n][part][first : first + num] for n, first, num in spans])
            for part in range(3)
        ]
        qkv, b, a = (functional.pad(part, (0, 3, 0, num_padding)) for part in parts)
        output = kernels.delta_rule(
            *(qkv[:, :-3], b[:, :-3], a[:, :-3], case.gates, shape),
            *(rows.plan(spans, num_padding, has_gaps=has_gaps), chunk, states),
        )
        assert output.isfinite().all()
        sizes_of = [num for *_, num in spans]
        rows_of = torch.split(output[: sum(sizes_of)], sizes_of)
        for (sequence, *_), part in zip(spans, rows_of, strict=True):
            outputs[sequence].append(part)
    found = {name: states.tensors[0][block] for name, block in rows.blocks.items()}
    return Computed(
        [torch.cat(parts) for parts in outputs],
        {name: state for name, state in found.items() if not state.isnan().any()},
    )


def expected(case: Case, sequence: int, *, in_chunks: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what transformers computes of a sequence, and its state at the end."""
    shape = case.shape
    qkv, b, a = case.inputs[sequence]
    query, key, value = (
        part.view(1, len(qkv), -1, size)
        for part, size in zip(
            torch.split(qkv, list(shape.part_sizes), dim=1),
            (shape.key_size, shape.key_size, shape.value_size),
            strict=True,
        )
    )
    decay = -case.gates.a_log.exp() * functional.softplus(a.float() + case.gates.dt_bias)
    function = (
        modeling_qwen3_5.torch_chunk_gated_delta_rule
        if in_chunks
        else modeling_qwen3_5.torch_recurrent_gated_delta_rule
    )
    output, state = function(
        *(query, key, value),
        g=decay.unsqueeze(0),
        beta=torch.sigmoid(b).unsqueeze(0),
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    return output.flatten(2)[0], state[0]
