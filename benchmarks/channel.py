"""Time of a round of the channel between ranks: each gathers what all have.

    PYTHONPATH=tests:benchmarks python benchmarks/channel.py [--ranks 2] [--windows 20] [--write]

The ranks are processes which do nothing else, so a round is as short as it can be and as long as
their cores are slow to wake. Quoted are the best window of 200 rounds and the median one, on the
rank that took longest, and the share of the time that this rank waited for the others. --write:
into benchmarks/results/channel.md and .json.
"""

import argparse
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
from results_file import write_report

from loraplex.bench.report import markdown_table
from loraplex.kernels.native.channel import SharedMemoryChannel
from loraplex.kernels.native.library import load_library
from support.ranks import run_ranks

ROUNDS = 200
SIZES = tuple(kib << 10 for kib in (4, 8, 64, 256, 1024))


def measure(channel: SharedMemoryChannel, num_windows: int) -> list[dict[str, float]]:
    """Return the figures of each size on one rank."""
    return [measure_size(channel, num_bytes, num_windows) for num_bytes in SIZES]


def measure_size(
    channel: SharedMemoryChannel, num_bytes: int, num_windows: int
) -> dict[str, float]:
    source = torch.zeros(num_bytes, dtype=torch.uint8)
    channel.gather(source)
    waited, times = channel.wait_seconds, []
    for _ in range(num_windows):
        start = time.perf_counter()
        for _ in range(ROUNDS):
            channel.gather(source)
        times.append((time.perf_counter() - start) / ROUNDS)
    return {
        "best_us": 1e6 * min(times),
        "median_us": 1e6 * statistics.median(times),
        "waited": (channel.wait_seconds - waited) / (sum(times) * ROUNDS),
    }


def slowest(ranks: Sequence[Sequence[dict[str, float]]]) -> list[dict[str, Any]]:
    """Return for each size the figures of the rank that took longest."""
    return [
        {"bytes": num_bytes, **max(figures, key=lambda rank: rank["median_us"])}
        for num_bytes, figures in zip(SIZES, zip(*ranks, strict=True), strict=True)
    ]


def table(rows: Sequence[dict[str, Any]]) -> str:
    cells = [
        [
            f"{row['bytes'] >> 10} KiB",
            f"{row['best_us']:.1f}",
            f"{row['median_us']:.1f}",
            f"{row['waited']:.0%}",
        ]
        for row in rows
    ]
    return markdown_table(["of each rank", "best us", "median us", "waited"], cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--windows", type=int, default=20)
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    figures = run_ranks(
        load_library(), arguments.ranks, lambda channel: measure(channel, arguments.windows)
    )
    rows = slowest(figures)
    print(table(rows))
    if arguments.write:
        write_report("channel", f"A round of {arguments.ranks} ranks", rows, table(rows))


if __name__ == "__main__":
    main()
