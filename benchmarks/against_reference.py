"""What the op benchmarks share: timing two backends in one run, and showing them side by side."""

import argparse
import json
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch

from loraplex.kernels.native.library import (
    INSTRUCTION_SETS,
    NativeLibrary,
    ThreadPool,
    load_library,
)

CaseT = TypeVar("CaseT")
KernelT = TypeVar("KernelT")

DTYPES = (torch.float32, torch.bfloat16)


def least_time(function: Callable[[], object], seconds: float) -> float:
    """Seconds of the fastest of many calls."""
    function()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < 3 or time.perf_counter() < end:
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return min(times)


def figures(
    case: str, dtype: torch.dtype, times: tuple[float, float], num_elements: int, num_flops: int
) -> dict[str, Any]:
    """One row. `times` are the native and the reference seconds; elements are those read."""
    native_time, reference_time = times
    return {
        "case": case,
        "dtype": str(dtype).removeprefix("torch."),
        "native_ms": native_time * 1e3,
        "reference_ms": reference_time * 1e3,
        "ratio": reference_time / native_time,
        "gb_per_second": num_elements * dtype.itemsize / native_time / 1e9,
        "gflop_per_second": num_flops / native_time / 1e9,
    }


def run(
    description: str,
    make_kernel: Callable[[NativeLibrary, ThreadPool], KernelT],
    cases: Iterable[CaseT],
    measure: Callable[[CaseT, torch.dtype, KernelT, float], dict[str, Any]],
    *,
    seconds: float,
) -> None:
    """Read the command line, measure every case in every dtype, print."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=seconds, help="per case and backend")
    parser.add_argument("--instruction-set", help="instead of the best one")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    wanted = arguments.instruction_set
    library = load_library([wanted] if wanted else INSTRUCTION_SETS)
    kernel = make_kernel(library, ThreadPool(library, arguments.threads))
    results = [
        measure(case, dtype, kernel, arguments.seconds) for case in cases for dtype in DTYPES
    ]
    if arguments.json:
        print(json.dumps({"instruction_set": library.instruction_set, "results": results}))
    else:
        _print_table(results)


def _print_table(results: Sequence[dict[str, Any]]) -> None:
    print("| case | dtype | native ms | reference ms | ratio | GB/s | GFLOP/s | of the floor |")
    print("|---|---|---|---|---|---|---|---|")
    for result in results:
        share = f"{result['share_of_floor']:.0%}" if "share_of_floor" in result else ""
        print(
            "| {case} | {dtype} | {native_ms:.3f} | {reference_ms:.3f} | {ratio:.1f} "
            "| {gb_per_second:.1f} | {gflop_per_second:.0f} | {share} |".format(
                share=share, **result
            )
        )
