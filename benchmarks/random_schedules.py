r"""Random schedules of a real model: tokens and logits must have the bits that they have alone.

    PYTHONPATH=tests python benchmarks/random_schedules.py MODEL [--schedules 20] \
        [--threads 2] [--dtype bfloat16]

Exits with 1 and names the differences if there are any. The tiny model of the tests has its
thousand schedules in tests/property/test_random_schedules.py.
"""

import argparse
import dataclasses
import json
import sys
import time
from pathlib import Path

import torch

from loraplex.execution.adapters.host_adapters import HostAdapters
from loraplex.execution.loading import load_parts
from loraplex.execution.sizing.settings import RunnerSettings
from support.random_schedules import Schedules


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--schedules", type=int, default=20)
    parser.add_argument("--requests", type=int, default=12)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", default="bfloat16")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    settings = RunnerSettings(
        dtype=arguments.dtype, max_model_len=64, max_num_seqs=8, block_size=4, max_lora_rank=8
    )
    start = time.perf_counter()
    parts = load_parts(arguments.model, settings, HostAdapters())
    schedules = Schedules(parts, num_requests=arguments.requests)
    problems = [p for seed in range(arguments.schedules) for p in schedules.run(seed)]
    report = {
        "model": arguments.model.name,
        "dtype": arguments.dtype,
        "threads": arguments.threads,
        "schedules": arguments.schedules,
        **dataclasses.asdict(schedules.tally),
        "seconds": round(time.perf_counter() - start, 1),
        "differences": problems,
    }
    print(json.dumps(report, indent=2))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
