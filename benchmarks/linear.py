"""The native linear against torch's own, at the sizes of a small Llama: a table, or JSON.

    python benchmarks/linear.py [--shapes 2048x2048,5632x2048] [--rows 1,4,8] [--json FILE]

Each figure is the least of many repetitions, taken in turns, so that figures of one run may be
compared. Copies of the weights rotate, so that they come from memory as they do in a model.
"""

import argparse
import itertools
import json
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch

from loraplex.kernels.native.library import ThreadPool, available_instruction_sets, load_library
from loraplex.kernels.native.linear import LinearKernel

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
BYTES_OF_WEIGHTS = 64 << 20
SECONDS_PER_ROW = 2.0

Call = Callable[[], object]


def native_calls(
    instruction_set: str, out_features: int, in_features: int, num_rows: int
) -> dict[str, Call]:
    library = load_library((instruction_set,))
    kernel = LinearKernel(library, ThreadPool(library, torch.get_num_threads()))
    calls: dict[str, Call] = {}
    for name, dtype in DTYPES.items():
        weights = [
            kernel.pack(torch.randn(out_features, in_features).to(dtype), None)
            for _ in range(num_copies(out_features, in_features, dtype))
        ]
        x, turn = torch.randn(num_rows, in_features).to(dtype), itertools.cycle(weights)
        calls[f"{instruction_set} {name}"] = lambda x=x, turn=turn: kernel.apply(x, next(turn))
    return calls


def torch_calls(out_features: int, in_features: int, num_rows: int) -> dict[str, Call]:
    weights = [
        torch.randn(out_features, in_features)
        for _ in range(num_copies(out_features, in_features, torch.float32))
    ]
    x, turn = torch.randn(num_rows, in_features), itertools.cycle(weights)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the age of these ops
        packed = [torch.ops.quantized.linear_prepack_fp16(weight, None) for weight in weights]
    packed_turn = itertools.cycle(packed)
    return {
        "F.linear fp32": lambda: torch.nn.functional.linear(x, next(turn)),
        "fbgemm fp16": lambda: torch.ops.quantized.linear_dynamic_fp16(x, next(packed_turn)),
    }


def num_copies(out_features: int, in_features: int, dtype: torch.dtype) -> int:
    return max(2, BYTES_OF_WEIGHTS // (out_features * in_features * dtype.itemsize))


def least_seconds(calls: dict[str, Call]) -> dict[str, float]:
    least = dict.fromkeys(calls, float("inf"))
    end = time.perf_counter() + SECONDS_PER_ROW
    while time.perf_counter() < end:
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            least[name] = min(least[name], time.perf_counter() - start)
    return least


def measure(out_features: int, in_features: int, num_rows: int) -> dict[str, float]:
    calls = torch_calls(out_features, in_features, num_rows)
    for instruction_set in available_instruction_sets():
        if instruction_set != "generic":
            calls |= native_calls(instruction_set, out_features, in_features, num_rows)
    return least_seconds(calls)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shapes", default="2048x2048,5632x2048,2048x5632", help="OUTxIN,...")
    parser.add_argument("--rows", default="1,4,8,16,32,128")
    parser.add_argument("--json", type=Path, help="write the seconds here too")
    arguments = parser.parse_args()
    results = []
    for shape in arguments.shapes.split(","):
        out_features, in_features = map(int, shape.split("x"))
        for num_rows in map(int, arguments.rows.split(",")):
            seconds = measure(out_features, in_features, num_rows)
            if not results:
                print("| out x in | M |" + "".join(f" {name}, ms |" for name in seconds))
                print("|---|---|" + "---|" * len(seconds))
            figures = "".join(f" {value * 1e3:.3f} |" for value in seconds.values())
            print(f"| {shape} | {num_rows} |{figures}", flush=True)
            results.append({"shape": shape, "rows": num_rows, "seconds": seconds})
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
