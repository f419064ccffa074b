"""The native linear against what this machine can do, and against torch: a table, or JSON.

    python benchmarks/linear.py [--shapes 2048x2048,5632x2048] [--rows 1,4,8] [--json FILE]

The floor is max(weight bytes / memory bandwidth, operations / float32 multiply-add peak), with
both limits measured first (machine_limits.py). A quantised kernel may be faster than the floor of
float32 arithmetic. Each figure is the least, and the middle, of many calls taken in turns with the
others of its line, so that figures of one line may be compared. Copies of the weights rotate
through more memory than the last cache has, as far as --gigabytes allows.
"""

import argparse
import dataclasses
import itertools
import json
import platform
import re
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from machine_limits import MachineLimits, measure_limits

from loraplex.core.weight_precision import WeightPrecision
from loraplex.kernels.native.library import (
    INSTRUCTION_SETS,
    ThreadPool,
    available_instruction_sets,
    load_library,
)
from loraplex.kernels.native.linear import NativeLinear
from loraplex.kernels.quantization import QuantizedWeight

WEIGHTS = {
    "fp32": (torch.float32, WeightPrecision.NATIVE),
    "bf16": (torch.bfloat16, WeightPrecision.NATIVE),
    "fp16": (torch.float16, WeightPrecision.NATIVE),
    "int8": (torch.bfloat16, WeightPrecision.INT8),
    "int4": (torch.bfloat16, WeightPrecision.INT4),
}
STORED = {
    "int8": (WeightPrecision.INT8, False),
    "int4": (WeightPrecision.INT4, False),
    "table": (WeightPrecision.INT4, True),
}
_STORED_NAME = re.compile(r"(int8|int4|table)-g([0-9]+)(-offsets)?")


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """One kernel at one shape: any number of rows, weights that rotate."""

    name: str
    weight_bytes: int
    call: Callable[[torch.Tensor], object]
    dtype: torch.dtype


@dataclasses.dataclass(frozen=True, slots=True)
class Shape:
    out_features: int
    in_features: int
    num_bytes: int  # of all copies of a weight

    def copies(self, weight_bytes: int) -> int:
        return max(2, self.num_bytes // weight_bytes)


def stored_weight(name: str, shape: Shape) -> QuantizedWeight:
    """Random weight as a checkpoint holds it, such as int8-g32, int4-g128-offsets or table-g64."""
    found = _STORED_NAME.fullmatch(name)
    if found is None:
        raise SystemExit(
            f"--weights: {name!r} is none of {', '.join(WEIGHTS)}, and not of the form "
            "int8-gN, int4-gN or table-gN with N inputs in a group, with -offsets or without"
        )
    (precision, has_table), group_size = STORED[found[1]], int(found[2])
    sizes = (shape.out_features, shape.in_features)
    lowest = 0 if has_table else -8
    scales = torch.rand(shape.out_features, -(-shape.in_features // group_size))
    return QuantizedWeight(
        precision,
        group_size,
        torch.randint(lowest, lowest + 16, sizes, dtype=torch.int8),
        scales,
        offsets=scales.clone() if found[3] else None,
        table=tuple(range(-64, 64, 8)) if has_table else None,
    )


def native_case(kernel: NativeLinear, shape: Shape, name: str, label: str) -> Case:
    if name in WEIGHTS:
        dtype, precision = WEIGHTS[name]
        weight = torch.randn(shape.out_features, shape.in_features).to(dtype)
        packed = kernel.pack(weight, None, precision)
    else:
        dtype, packed = torch.bfloat16, kernel.pack(stored_weight(name, shape), None)
    turn = itertools.cycle(
        [
            dataclasses.replace(packed, panels=packed.panels.clone())
            for _ in range(shape.copies(packed.panels.nbytes))
        ]
    )
    return Case(label, packed.panels.nbytes, lambda x: kernel.apply(x, next(turn)), dtype)


def torch_cases(shape: Shape) -> list[Case]:
    weight = torch.randn(shape.out_features, shape.in_features)
    turn = itertools.cycle([weight.clone() for _ in range(shape.copies(weight.nbytes))])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the age of these ops
        packed = [
            torch.ops.quantized.linear_prepack_fp16(weight, None)
            for _ in range(shape.copies(weight.nbytes // 2))
        ]
    packed_turn = itertools.cycle(packed)
    return [
        Case(
            "F.linear fp32",
            weight.nbytes,
            lambda x: torch.nn.functional.linear(x, next(turn)),
            torch.float32,
        ),
        Case(
            "fbgemm fp16",
            weight.nbytes // 2,
            lambda x: torch.ops.quantized.linear_dynamic_fp16(x, next(packed_turn)),
            torch.float32,
        ),
    ]


def measure(cases: list[Case], inputs: list[torch.Tensor], seconds: float) -> list[list[float]]:
    """Seconds of every call of each case."""
    times: list[list[float]] = [[] for _ in cases]
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times[0]) < 3:
        for case, x, case_times in zip(cases, inputs, times, strict=True):
            start = time.perf_counter()
            case.call(x)
            case_times.append(time.perf_counter() - start)
    return times


def figures(
    case: Case, shape: Shape, num_rows: int, times: list[float], limits: MachineLimits
) -> dict[str, Any]:
    num_flops = 2 * num_rows * shape.out_features * shape.in_features
    floor = limits.floor_seconds(case.weight_bytes, num_flops)
    least, median = min(times), statistics.median(times)
    return {
        "shape": f"{shape.out_features}x{shape.in_features}",
        "rows": num_rows,
        "kernel": case.name,
        "calls": len(times),
        "least_seconds": least,
        "median_seconds": median,
        "floor_seconds": floor,
        "share_of_floor": floor / least,
        "median_share_of_floor": floor / median,
    }


def arguments_of_command_line() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shapes", default="2048x2048,5632x2048,2048x5632", help="OUTxIN,...")
    parser.add_argument("--rows", default="1,4,8,16,32,128,512")
    parser.add_argument(
        "--weights",
        default=",".join(WEIGHTS),
        help="also int8-g32, int4-g128-offsets, table-g64: of checkpoints, in groups of so many",
    )
    parser.add_argument("--instruction-sets", help="of those that this CPU has; usually the best")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=3.0, help="for each line of the table")
    parser.add_argument(
        "--gigabytes", type=float, default=0.4, help="copies of one weight, at most"
    )
    parser.add_argument("--torch", action="store_true", help="measure torch, too")
    parser.add_argument("--json", type=Path, help="write all figures here, too")
    return parser.parse_args()


def make_cases(arguments: argparse.Namespace, shape: Shape) -> list[Case]:
    available = available_instruction_sets()
    wanted = arguments.instruction_sets
    names = wanted.split(",") if wanted else [next(n for n in INSTRUCTION_SETS if n in available)]
    cases = []
    for name in names:
        library = load_library((name,))
        kernel = NativeLinear(library, ThreadPool(library, arguments.threads))
        cases += [
            native_case(kernel, shape, weights, f"{name} {weights}")
            for weights in arguments.weights.split(",")
        ]
    return cases + (torch_cases(shape) if arguments.torch else [])


def main() -> None:
    arguments = arguments_of_command_line()
    torch.set_num_threads(arguments.threads)
    limits = measure_limits(arguments.threads)
    print(
        f"{limits.num_threads} threads: {limits.flops / 1e9:.0f} GFLOP/s in vectors of "
        f"{limits.vector_bytes} bytes, {limits.read_bytes / 1e9:.1f} GB/s from memory (median "
        f"{limits.median_read_bytes / 1e9:.1f}); last cache {limits.last_cache_bytes >> 20} MiB\n"
    )
    results = []
    num_bytes = min(int(arguments.gigabytes * 1e9), max(1 << 26, 2 * limits.last_cache_bytes))
    for text in arguments.shapes.split(","):
        out_features, in_features = map(int, text.split("x"))
        shape = Shape(out_features, in_features, num_bytes)
        cases = make_cases(arguments, shape)
        print("| out x in | M |" + "".join(f" {case.name} |" for case in cases))
        print("|---|---|" + "---|" * len(cases))
        for num_rows in map(int, arguments.rows.split(",")):
            x = torch.randn(num_rows, in_features)
            inputs = [x.to(case.dtype) for case in cases]
            times = measure(cases, inputs, arguments.seconds)
            line = [
                figures(case, shape, num_rows, case_times, limits)
                for case, case_times in zip(cases, times, strict=True)
            ]
            cells = "".join(
                " {:.3f} ms, {:.0%} ({:.0%}) |".format(
                    result["least_seconds"] * 1e3,
                    result["share_of_floor"],
                    result["median_share_of_floor"],
                )
                for result in line
            )
            print(f"| {text} | {num_rows} |{cells}", flush=True)
            results += line
    if arguments.json is not None:
        report = {
            "machine": platform.processor() or platform.machine(),
            "limits": dataclasses.asdict(limits),
            "bytes_of_copies": num_bytes,
            "results": results,
        }
        arguments.json.write_text(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
