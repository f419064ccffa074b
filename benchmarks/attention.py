"""Paged attention: native kernels against the torch reference, in one run.

    python benchmarks/attention.py [--json] [--threads 2] [--seconds 0.5]

A time is the least of many calls: the machine is shared. GB/s counts the keys and values that the
rows see, once; GFLOP/s counts the two products over the keys that a token sees.
"""

import argparse
import dataclasses
import itertools
import json
import time
from collections.abc import Callable, Sequence

import torch

from loraplex.kernels.native.attention import AttentionKernel
from loraplex.kernels.native.library import INSTRUCTION_SETS, ThreadPool, load_library
from loraplex.kernels.ops import AttentionShape, KVStorage, RowLayout
from loraplex.kernels.reference import ReferenceKernels

BLOCK_SIZE = 16
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclasses.dataclass(frozen=True)
class Case:
    """Rows that all have `context` positions and compute the last `num_queries` of them."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_rows: int
    context: int
    num_queries: int = 1

    @property
    def name(self) -> str:
        heads = f"{self.num_heads}/{self.num_kv_heads}x{self.head_dim}"
        return f"{heads} rows {self.num_rows} context {self.context} queries {self.num_queries}"

    @property
    def kv_elements(self) -> int:
        return 2 * self.num_rows * self.context * self.num_kv_heads * self.head_dim

    @property
    def num_flops(self) -> int:
        first = self.context - self.num_queries
        num_pairs = sum(range(first + 1, self.context + 1)) * self.num_rows
        return 4 * num_pairs * self.num_heads * self.head_dim


CASES = [
    *(Case(32, 8, 64, rows, context) for rows, context in ((1, 256), (1, 4096), (8, 256))),
    *(Case(32, 8, 64, rows, context) for rows, context in ((8, 1024), (32, 256), (32, 1024))),
    Case(32, 8, 128, 8, 1024),
    Case(8, 8, 64, 8, 1024),
    Case(32, 4, 64, 8, 1024),
    Case(32, 8, 64, 1, 512, num_queries=512),
    Case(32, 8, 64, 1, 2048, num_queries=512),
]


def least_time(function: Callable[[], object], seconds: float) -> float:
    function()
    times = []
    end = time.perf_counter() + seconds
    while len(times) < 3 or time.perf_counter() < end:
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return min(times)


def block_tables(case: Case) -> torch.Tensor:
    per_row = -(-case.context // BLOCK_SIZE)
    return torch.randperm(case.num_rows * per_row).view(case.num_rows, per_row)


def measure(case: Case, dtype: torch.dtype, native: AttentionKernel, seconds: float) -> dict:
    shape = AttentionShape(case.num_heads, case.num_kv_heads, case.head_dim, BLOCK_SIZE)
    tables = block_tables(case)
    counts = itertools.accumulate([case.num_queries] * case.num_rows, initial=0)
    rows = RowLayout(list(counts), [case.context] * case.num_rows, tables)
    query = torch.randn(case.num_queries * case.num_rows, case.num_heads, case.head_dim).to(dtype)
    reference = ReferenceKernels(torch.device("cpu"))

    def filled(storage: KVStorage) -> KVStorage:
        storage.key.normal_()
        storage.value.normal_()
        return storage

    storage = filled(native.allocate(tables.numel(), shape, dtype))
    plan = native.plan(rows, shape, None)
    native_time = least_time(lambda: native.attend(query, storage, plan), seconds)
    storage = filled(reference.allocate_kv(tables.numel(), shape, dtype))
    reference_plan = reference.plan_attention(rows, shape, None)
    reference_time = least_time(
        lambda: reference.paged_attention(query, storage, reference_plan), seconds
    )
    return {
        "case": case.name,
        "dtype": str(dtype).removeprefix("torch."),
        "native_ms": native_time * 1e3,
        "reference_ms": reference_time * 1e3,
        "ratio": reference_time / native_time,
        "gb_per_second": case.kv_elements * dtype.itemsize / native_time / 1e9,
        "gflop_per_second": case.num_flops / native_time / 1e9,
    }


def print_table(results: Sequence[dict]) -> None:
    print("| case | dtype | native ms | reference ms | ratio | GB/s | GFLOP/s |")
    print("|---|---|---|---|---|---|---|")
    for result in results:
        print(
            "| {case} | {dtype} | {native_ms:.3f} | {reference_ms:.3f} | {ratio:.1f} "
            "| {gb_per_second:.1f} | {gflop_per_second:.0f} |".format(**result)
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=0.5, help="per case and backend")
    parser.add_argument("--instruction-set", help="instead of the best one")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    wanted = arguments.instruction_set
    library = load_library([wanted] if wanted else INSTRUCTION_SETS)
    native = AttentionKernel(library, ThreadPool(library, arguments.threads))
    results = [
        measure(case, dtype, native, arguments.seconds)
        for case in CASES
        for dtype in DTYPES.values()
    ]
    if arguments.json:
        print(json.dumps({"instruction_set": library.instruction_set, "results": results}))
    else:
        print_table(results)


if __name__ == "__main__":
    main()
