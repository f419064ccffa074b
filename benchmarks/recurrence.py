"""Gated delta rule and state space of Mamba2: native kernels against the torch reference.

    PYTHONPATH=tests python benchmarks/recurrence.py [--json] [--threads 2] [--seconds 0.5]

A decoding row is in the middle between two borders: it reads its state and half of the positions
that are kept since the last one, which is what GB/s counts; at a border it writes a state, too. A
prompt is one row. GFLOP/s counts the products of the formula (kernels.recurrence): three with the
state, of which one is its update, and for the pairs of positions between two borders those of keys,
queries and values. Steps take turns with storages that are together larger than the last cache, as
the layers of a model are. The floor is that of machine_limits.py, in float32.
"""

import dataclasses
import functools
import itertools
from typing import Any

import torch
from against_reference import figures, least_time, run
from machine_limits import measure_limits

from loraplex.kernels.delta import DeltaGates, DeltaShape
from loraplex.kernels.native.backend import NativeKernels
from loraplex.kernels.native.library import NativeLibrary, ThreadPool
from loraplex.kernels.ops import Kernels, Storage
from loraplex.kernels.reference import ReferenceKernels
from loraplex.kernels.ssm import SsmGates, SsmShape
from loraplex.kernels.states import StatePlan
from support.stored_positions import RowSpan, StoredPositions

BLOCK_SIZE, EVERY = 16, 64
FLOAT_BYTES = 4
"""Bytes of a number of a state, and of what is kept of a position."""


@dataclasses.dataclass(frozen=True)
class Case:
    """Rows of one layer, each of `num_tokens` tokens from position `first` on."""

    num_key_heads: int
    num_value_heads: int
    key_size: int
    value_size: int
    is_delta: bool
    num_rows: int
    num_tokens: int = 1
    first: int = EVERY + EVERY // 2

    @property
    def name(self) -> str:
        kind = "delta rule" if self.is_delta else "state space"
        heads = f"{self.num_key_heads}/{self.num_value_heads}x{self.key_size}x{self.value_size}"
        at_border = ", border" if self.num_tokens == 1 and (self.first + 1) % EVERY == 0 else ""
        return f"{kind} {heads} rows {self.num_rows} tokens {self.num_tokens}{at_border}"

    @property
    def kept_sizes(self) -> tuple[int, int, int]:
        """Numbers of keys, values and decays that are kept of a position."""
        values = self.num_value_heads * self.value_size
        return self.num_key_heads * self.key_size, values, self.num_value_heads

    @property
    def num_state(self) -> int:
        return self.num_value_heads * self.key_size * self.value_size

    @property
    def num_bytes(self) -> int:
        """Bytes of states and kept positions that a step reads and writes."""
        spans = range(self.first, self.first + self.num_tokens)
        kept = self.first % EVERY + self.num_tokens
        states = (self.first >= EVERY) + sum((end + 1) % EVERY == 0 for end in spans)
        return FLOAT_BYTES * self.num_rows * (states * self.num_state + kept * sum(self.kept_sizes))

    @property
    def num_flops(self) -> int:
        """Operations of the formula: a multiply and an add are two."""
        spans = range(self.first, self.first + self.num_tokens)
        pairs = sum(position % EVERY + 1 for position in spans)
        of_pair = self.num_value_heads * (self.key_size + self.value_size)
        # A delta rule multiplies with states and pairs twice: for what it writes, then again.
        times = 1 + self.is_delta
        of_states = (times + 1) * self.num_tokens * self.num_state
        return 2 * self.num_rows * (of_states + times * pairs * of_pair)


QWEN = (16, 16, 128, 128, True)
"""The delta rule of Qwen3.5-2B."""
GRANITE = (1, 48, 128, 64, False)
"""The state space of Granite-4.0-H-Micro."""
CASES = [
    case
    for heads in (QWEN, GRANITE)
    for case in (
        *(Case(*heads, num_rows=count) for count in (1, 8, 32)),
        Case(*heads, num_rows=8, first=2 * EVERY - 1),
        Case(*heads, num_rows=1, num_tokens=512, first=0),
    )
]
_limits = functools.cache(measure_limits)


def plan_of(case: Case) -> StatePlan:
    """Each row has two states of its own: the one that it reads, and one to write."""
    positions = StoredPositions([case.first + case.num_tokens] * case.num_rows, BLOCK_SIZE)
    spans: list[RowSpan] = [(row, case.first, case.num_tokens) for row in range(case.num_rows)]
    stored = positions.rows(spans)
    reads = [2 * row if case.first >= EVERY else -1 for row in range(case.num_rows)]
    writes = [
        2 * row + 1 if (position + 1) % EVERY == 0 else -1
        for row, first, count in spans
        for position in range(first, first + count)
    ]
    return StatePlan(
        stored.query_start_loc,
        stored.positions,
        torch.tensor(reads),
        torch.tensor(writes),
        *(stored.places, stored.table_starts, stored.tables),
    )


def storages_of(case: Case) -> tuple[Storage, Storage]:
    num_blocks = case.num_rows * -(-(case.first + case.num_tokens) // BLOCK_SIZE) + 1
    # The first tensor is the convolution's.
    kept = [torch.randn(num_blocks, BLOCK_SIZE, size) / 10 for size in (1, *case.kept_sizes)]
    sizes = (2 * case.num_rows, case.num_value_heads, case.key_size, case.value_size)
    return Storage(tuple(kept)), Storage((torch.randn(sizes) / 10,))


def measure(
    case: Case, dtype: torch.dtype, native: NativeKernels, seconds: float
) -> dict[str, Any]:
    torch.default_generator.manual_seed(0)
    limits, plan = _limits(torch.get_num_threads()), plan_of(case)
    count = case.num_rows * case.num_tokens
    keys, values, heads = case.kept_sizes
    numbers = torch.randn(count, 2 * keys + values).to(dtype)
    a, b = torch.randn(2, count, heads).to(dtype)
    storages = [storages_of(case) for _ in range(1 + 2 * limits.last_cache_bytes // case.num_bytes)]
    turn = itertools.cycle(storages)

    def compute(kernels: Kernels) -> torch.Tensor:
        if case.is_delta:
            gates = DeltaGates(torch.zeros(heads), torch.zeros(heads))
            shape = DeltaShape(*dataclasses.astuple(case)[:4], EVERY)
            return kernels.delta_rule(numbers, b, a, gates, shape, plan, *next(turn))
        rates = SsmGates(-torch.ones(heads), torch.zeros(heads), torch.ones(heads), 0.0, 100.0)
        sizes = SsmShape(heads, case.value_size, case.key_size, case.num_key_heads, EVERY)
        return kernels.ssd(numbers, a, rates, sizes, plan, *next(turn))

    native_time = least_time(lambda: compute(native), seconds)
    reference = ReferenceKernels(torch.device("cpu"))
    times = (native_time, least_time(lambda: compute(reference), seconds))
    row = figures(case.name, dtype, times, case.num_bytes // dtype.itemsize, case.num_flops)
    floor = limits.floor_seconds(case.num_bytes, case.num_flops)
    return row | {"share_of_floor": floor / native_time}


def _make_kernels(library: NativeLibrary, _pool: ThreadPool) -> NativeKernels:
    return NativeKernels(library, torch.get_num_threads())


if __name__ == "__main__":
    run(__doc__, _make_kernels, CASES, measure, seconds=0.5)
