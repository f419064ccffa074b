"""Rows that all have other values of an option, against rows that all have the same.

    python benchmarks/sampling_options.py [--json] [--threads 2] [--rounds 30] [--rows 64]

Both steps have the same options active, so they do the same work if it does not matter
which row requests what. A step is Sampler.sample, Python included, of the native kernels; each row
has a prompt of 1,000 tokens. The two kinds take turns in one run, each round with a step
of each; the figures are the medians of the rounds, and of the rounds' ratios.
"""

import argparse
import dataclasses
import json
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from loraplex.core.plan import RowAdded, RowStep
from loraplex.core.sampling_params import SamplingParams
from loraplex.core.task import Generate
from loraplex.execution.sampling.sampler import Sampler
from loraplex.kernels.native.backend import NativeKernels
from loraplex.kernels.native.library import load_library
from loraplex.kernels.ops import Kernels

CPU = torch.device("cpu")
VOCAB_SIZES = (32_000, 128_256)
NUM_PROMPT_TOKENS = 1000
MOST = 1.3
"""The ratio that is allowed."""

Option = Callable[[int, int], dict[str, Any]]
"""Options of a row by its number and the vocabulary's size. Row 0 has the equal value."""


def _random_ids(change: int, vocab_size: int, count: int) -> tuple[int, ...]:
    return tuple(sorted(random.Random(change).sample(range(vocab_size), count)))


OPTIONS: dict[str, Option] = {
    "greedy": lambda change, _: {"temperature": 0.0, "seed": change},
    "temperature": lambda change, _: {"temperature": 0.7 + change / 100},
    "top_k": lambda change, _: {"top_k": 50 + change},
    "top_p": lambda change, _: {"top_p": 0.9 - change / 1000},
    "top_p_decay": lambda change, _: {
        "top_p": 0.9,
        "top_p_decay": 0.99 - change / 10_000,
        "top_p_min": 0.5 + change / 1000,
        "top_p_reset_id": change,
    },
    "min_p": lambda change, _: {"min_p": 0.02 + change / 10_000},
    "repetition_penalty": lambda change, _: {"repetition_penalty": 1.1 + change / 1000},
    "presence_penalty": lambda change, _: {"presence_penalty": 0.5 + change / 1000},
    "frequency_penalty": lambda change, _: {"frequency_penalty": 0.5 + change / 1000},
    "no_repeat_ngram_size": lambda change, _: {"no_repeat_ngram_size": 3 + change % 8},
    "min_tokens": lambda change, _: {"min_tokens": 10**6 + change},
    "bad_token_ids": lambda change, vocab_size: {
        "bad_token_ids": tuple((i,) for i in _random_ids(change, vocab_size, 16))
        + tuple((i, i + 1) for i in _random_ids(change + 1, vocab_size, 16))
    },
    "logit_bias": lambda change, vocab_size: {
        "logit_bias": tuple((i, 1.0 + change / 100) for i in _random_ids(change, vocab_size, 100))
    },
    "allowed_token_ids": lambda change, vocab_size: {
        "allowed_token_ids": _random_ids(change, vocab_size, vocab_size // 4)
    },
    "logprobs": lambda change, _: {"logprobs": 5 + change % 16},
}


def params_of(options: list[str], change: int, vocab_size: int) -> SamplingParams:
    fields: dict[str, Any] = {}
    for option in options:
        fields |= OPTIONS[option](change, vocab_size)
    return SamplingParams(**({"max_tokens": None} | fields))


@dataclasses.dataclass(frozen=True)
class Steps:
    """Rows that decode; the same step again and again, each time one token longer."""

    sampler: Sampler
    steps: list[RowStep]
    logits: torch.Tensor

    @classmethod
    def of(
        cls, kernels: Kernels, logits: torch.Tensor, options: list[str], *, mixed: bool
    ) -> "Steps":
        num_rows, vocab_size = logits.shape
        sampler = Sampler(vocab_size, device=CPU, kernels=kernels)
        steps = []
        for slot in range(num_rows):
            sampling = params_of(options, slot if mixed else 0, vocab_size)
            rng = random.Random(slot)
            prompt = tuple(rng.randrange(vocab_size) for _ in range(NUM_PROMPT_TOKENS))
            sampler.add_row(
                RowAdded(
                    slot=slot,
                    sequence_id=slot,
                    task=Generate(sampling, seed=slot, suppressed_token_ids=(1, 2)),
                    sequence_index=0,
                    token_ids=prompt,
                    num_prompt_tokens=len(prompt),
                )
            )
            steps.append(RowStep(slot=slot, start=0, num_tokens=1, num_logprobs=sampling.logprobs))
        return cls(sampler, steps, logits)

    def seconds(self) -> float:
        """Time one more step."""
        start = time.perf_counter()
        results = self.sampler.sample(self.logits, self.steps)
        seconds = time.perf_counter() - start
        assert all(result.token_ids for result in results)
        return seconds


def measure(
    kernels: Kernels, vocab_size: int, num_rows: int, name: str, rounds: int
) -> dict[str, Any]:
    options = list(OPTIONS)[1:] if name == "all but greedy" else [name]
    # The likeliest of so many Gaussian logits hold a part of the weight, as those of a model do.
    logits = 4 * torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        equal = Steps.of(kernels, logits, options, mixed=False)
        mixed = Steps.of(kernels, logits, options, mixed=True)
        equal.seconds(), mixed.seconds()
        pairs = [(equal.seconds(), mixed.seconds()) for _ in range(rounds)]
    return {
        "vocab_size": vocab_size,
        "rows": num_rows,
        "option": name,
        "equal_ms": 1e3 * statistics.median(pair[0] for pair in pairs),
        "mixed_ms": 1e3 * statistics.median(pair[1] for pair in pairs),
        "ratio": statistics.median(mixed / equal for equal, mixed in pairs),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--rows", type=int, default=64)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    library = load_library()
    kernels = NativeKernels(library, arguments.threads)
    results = [
        measure(kernels, vocab_size, arguments.rows, name, arguments.rounds)
        for vocab_size in VOCAB_SIZES
        for name in (*OPTIONS, "all but greedy")
    ]
    if arguments.json:
        print(json.dumps({"instruction_set": library.instruction_set, "results": results}))
        return
    print("| vocabulary | rows | option | equal ms | mixed ms | mixed / equal |")
    print("|---|---|---|---|---|---|")
    for result in results:
        print(
            "| {vocab_size} | {rows} | {option} | {equal_ms:.2f} | {mixed_ms:.2f} "
            "| {ratio:.2f} |".format(**result)
        )
    worst = max(result["ratio"] for result in results)
    print(f"\nThe worst ratio is {worst:.2f}; at most {MOST} is wanted.")


if __name__ == "__main__":
    main()
