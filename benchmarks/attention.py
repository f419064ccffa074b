"""Paged attention: native kernels against the torch reference, in one run.

    python benchmarks/attention.py [--json] [--threads 2] [--seconds 0.5]

A time is the least of many calls: the machine is shared. Calls take turns with storages that are
together larger than the last cache, as the layers of a model are. GB/s counts the keys and values
that the rows see, once; GFLOP/s counts the two products over the keys that a token sees. The floor
of this machine (machine_limits.py) is computed from both, with the arithmetic of float32.
"""

import dataclasses
import functools
import itertools
from typing import Any

import torch
from against_reference import figures, least_time, run
from machine_limits import measure_limits

from loraplex.kernels.native.attention import NativeAttention
from loraplex.kernels.ops import AttentionRules, AttentionShape, RowLayout
from loraplex.kernels.reference import ReferenceKernels

BLOCK_SIZE = 16


@dataclasses.dataclass(frozen=True)
class Case:
    """Rows that all have `context` positions and compute the last `num_queries` of them."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_rows: int
    context: int
    num_queries: int = 1
    kv_dtype: torch.dtype | None = None
    """None: that of the queries."""

    @property
    def name(self) -> str:
        heads = f"{self.num_heads}/{self.num_kv_heads}x{self.head_dim}"
        stored = "" if self.kv_dtype is None else f" {self.kv_dtype}".replace("torch.", "KV ")
        rows = f"rows {self.num_rows} context {self.context} queries {self.num_queries}"
        return f"{heads} {rows}{stored}"

    @property
    def shape(self) -> AttentionShape:
        return AttentionShape(self.num_heads, self.num_kv_heads, self.head_dim, BLOCK_SIZE)

    def kv_bytes(self, dtype: torch.dtype) -> int:
        """dtype: of the queries."""
        per_block = self.shape.block_bytes(self.kv_dtype or dtype)
        return self.num_rows * self.context * per_block // BLOCK_SIZE

    @property
    def num_flops(self) -> int:
        first = self.context - self.num_queries
        num_pairs = sum(range(first + 1, self.context + 1)) * self.num_rows
        return 4 * num_pairs * self.num_heads * self.head_dim


CASES = [
    *(Case(32, 8, 64, rows, context) for rows, context in ((1, 256), (1, 4096), (8, 256))),
    *(Case(32, 8, 64, rows, context) for rows, context in ((8, 1024), (32, 256), (32, 1024))),
    *(
        Case(32, 8, 64, rows, context, kv_dtype=torch.int8)
        for rows, context in ((1, 256), (1, 4096), (8, 1024), (32, 1024))
    ),
    Case(32, 8, 128, 8, 1024),
    Case(8, 8, 64, 8, 1024),
    Case(32, 4, 64, 8, 1024),
    Case(32, 8, 64, 1, 512, num_queries=512),
    Case(32, 8, 64, 1, 2048, num_queries=512),
    Case(32, 8, 64, 1, 8192),
    Case(32, 8, 128, 1, 8192),
    Case(32, 8, 64, 1, 8192, num_queries=512),
    Case(32, 8, 128, 1, 8192, num_queries=512),
]
_limits = functools.cache(measure_limits)


def block_tables(case: Case) -> torch.Tensor:
    per_row = -(-case.context // BLOCK_SIZE)
    return torch.randperm(case.num_rows * per_row).view(case.num_rows, per_row)


def measure(
    case: Case, dtype: torch.dtype, native: NativeAttention, seconds: float
) -> dict[str, Any]:
    shape, kv_dtype = case.shape, case.kv_dtype or dtype
    tables = block_tables(case)
    counts = itertools.accumulate([case.num_queries] * case.num_rows, initial=0)
    rows = RowLayout(list(counts), [case.context] * case.num_rows, tables)
    query = torch.randn(case.num_queries * case.num_rows, case.num_heads, case.head_dim).to(dtype)
    reference = ReferenceKernels(torch.device("cpu"))
    slots = torch.arange(tables.numel() * BLOCK_SIZE)
    key, value = torch.randn(2, len(slots), case.num_kv_heads, case.head_dim).to(dtype)

    limits, kv_bytes = _limits(torch.get_num_threads()), case.kv_bytes(dtype)
    storages = []
    for _ in range(-(-2 * limits.last_cache_bytes // kv_bytes)):
        storages.append(native.allocate(tables.numel(), shape, kv_dtype))
        native.write(storages[-1], key, value, slots)
    turn = itertools.cycle(storages)
    rules = AttentionRules(scale=shape.head_dim**-0.5)
    plan = native.plan(rows, shape, rules)
    native_time = least_time(lambda: native.attend(query, next(turn), plan), seconds)
    reference_storage = reference.allocate_kv(tables.numel(), shape, kv_dtype)
    reference.write_kv(reference_storage, key, value, slots)
    reference_plan = reference.plan_attention(rows, shape, rules)
    reference_time = least_time(
        lambda: reference.paged_attention(query, reference_storage, reference_plan), seconds
    )
    times = (native_time, reference_time)
    row = figures(case.name, dtype, times, kv_bytes // dtype.itemsize, case.num_flops)
    floor = limits.floor_seconds(kv_bytes, case.num_flops)
    return row | {"share_of_floor": floor / native_time}


if __name__ == "__main__":
    run(__doc__, NativeAttention, CASES, measure, seconds=0.5)
