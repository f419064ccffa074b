"""Sampling a step's rows: native kernels, the torch reference, and rows that are all different.

    python benchmarks/sampling.py [--json] [--threads 2] [--seconds 0.5]

Every row requests log probabilities of 5 tokens. A time is the least of many calls of
Sampler.sample, Python included: the machine is shared. "mixed" is a native step whose rows all have
other options of the same kind, against one whose rows have the same.
"""

import argparse
import json
from typing import Any

import torch
from against_reference import least_time

from loraplex.core.plan import RowAdded, RowStep
from loraplex.core.sampling_params import SamplingParams
from loraplex.core.task import Generate
from loraplex.execution.sampling.sampler import Sampler
from loraplex.kernels.native.backend import NativeKernels
from loraplex.kernels.native.library import load_library
from loraplex.kernels.ops import Kernels
from loraplex.kernels.reference import ReferenceKernels

CPU = torch.device("cpu")
VOCAB_SIZES = (32_000, 128_256)
NUMS_ROWS = (1, 8, 32, 64)
NUM_LOGPROBS = 5
KINDS = ("greedy", "temperature", "top-k 50", "top-p 0.9")


def params_of(kind: str, change: int) -> SamplingParams:
    """change 0 is the kind itself; the others are near it."""
    near = 1 + change / 1000
    match kind:
        case "greedy":
            return SamplingParams(temperature=0.0, seed=change)
        case "temperature":
            return SamplingParams(temperature=near)
        case "top-k 50":
            return SamplingParams(temperature=near, top_k=50 + change % 16)
    return SamplingParams(temperature=near, top_p=0.9 * near)


def step_of(kernels: Kernels, logits: torch.Tensor, kind: str, *, mixed: bool = False) -> Any:
    """A function that samples the rows once."""
    num_rows, vocab_size = logits.shape
    sampler = Sampler(vocab_size, device=CPU, kernels=kernels)
    for slot in range(num_rows):
        sampler.add_row(
            RowAdded(
                slot=slot,
                sequence_id=slot,
                task=Generate(params_of(kind, slot if mixed else 0), seed=slot),
                sequence_index=0,
                token_ids=(1,),
                num_prompt_tokens=1,
            )
        )
    steps = [
        RowStep(slot=slot, start=0, num_tokens=1, num_logprobs=NUM_LOGPROBS)
        for slot in range(num_rows)
    ]
    return lambda: sampler.sample(logits, steps)


def measure(
    native: Kernels, vocab_size: int, num_rows: int, kind: str, seconds: float
) -> dict[str, Any]:
    # The likeliest of so many Gaussian logits hold a part of the weight, as those of a model do.
    logits = 4 * torch.randn(num_rows, vocab_size)
    reference = ReferenceKernels(CPU)
    with torch.inference_mode():
        native_time = least_time(step_of(native, logits, kind), seconds)
        mixed_time = least_time(step_of(native, logits, kind, mixed=True), seconds)
        reference_time = least_time(step_of(reference, logits, kind), seconds)
    return {
        "vocab_size": vocab_size,
        "rows": num_rows,
        "kind": kind,
        "native_ms": native_time * 1e3,
        "reference_ms": reference_time * 1e3,
        "ratio": reference_time / native_time,
        "mixed": mixed_time / native_time,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=0.5, help="per case and backend")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    library = load_library()
    native = NativeKernels(library, arguments.threads)
    results = [
        measure(native, vocab_size, num_rows, kind, arguments.seconds)
        for vocab_size in VOCAB_SIZES
        for kind in KINDS
        for num_rows in NUMS_ROWS
    ]
    if arguments.json:
        print(json.dumps({"instruction_set": library.instruction_set, "results": results}))
        return
    print("| vocabulary | rows | kind | native ms | reference ms | ratio | mixed / equal |")
    print("|---|---|---|---|---|---|---|")
    for result in results:
        print(
            "| {vocab_size} | {rows} | {kind} | {native_ms:.3f} | {reference_ms:.3f} "
            "| {ratio:.1f} | {mixed:.2f} |".format(**result)
        )


if __name__ == "__main__":
    main()
