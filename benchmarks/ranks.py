r"""Cost of ranks: two with one thread each against one rank with two threads, on the same cores.

    PYTHONPATH=tests:benchmarks python benchmarks/ranks.py [--model small] [--rounds 6] [--write]

Random weights of 853 million parameters (small) in bfloat16. So many rows decode together, with and
without an adapter of rank 8 for each. The two engines are processes that live side by side; one at
a time has work, and in each round each has a turn, in another order. A turn is the time of
`--steps` decoding steps: what a long generation takes more than a short one. Quoted are medians
over the rounds of times, and of ratios within a round; waiting is the share of a turn in which rank
0 waited for the other. --write: into benchmarks/results/ranks.md and .json.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from comparison.fixtures import RANK_8, Fixture
from comparison.shapes import find_shape
from results_file import write_report

from loraplex import LLM, SamplingParams
from loraplex.bench.report import markdown_table

ONE, TWO = "one rank, two threads", "two ranks, one thread each"
KINDS: Final[Mapping[str, Mapping[str, int]]] = {
    ONE: {"num_threads": 2},
    TWO: {"num_threads": 1, "tensor_parallel_size": 2},
}
ROWS: Final = (1, 8, 32)
PROMPT_TOKENS: Final = 4


def generation_seconds(llm: LLM, prompts: Sequence[list[int]], names: Any, tokens: int) -> float:
    sampling = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
    start = time.perf_counter()
    llm.generate(prompts, sampling, adapter=names)
    return time.perf_counter() - start


def turn(llm: LLM, rows: int, names: Any, steps: int) -> tuple[float, float]:
    """Return (seconds of a step, share of them that rank 0 waited)."""
    prompts = [[5 + row, *range(10, 10 + PROMPT_TOKENS - 1)] for row in range(rows)]
    short = generation_seconds(llm, prompts, names, 1)
    waited = llm.stats().rank_wait_ns[:1]
    long = generation_seconds(llm, prompts, names, 1 + steps)
    after = llm.stats().rank_wait_ns[:1]
    share = (after[0] - waited[0]) / 1e9 / long if after and waited else 0.0
    return (long - short) / steps, share


def measure(
    engines: Mapping[str, LLM], rows: int, names: Any, rounds: int, steps: int
) -> dict[str, list[tuple[float, float]]]:
    kinds = list(engines)
    found: dict[str, list[tuple[float, float]]] = {kind: [] for kind in kinds}
    for kind in kinds:
        turn(engines[kind], rows, names, 2)
    for number in range(rounds):
        for kind in kinds if number % 2 else kinds[::-1]:
            found[kind].append(turn(engines[kind], rows, names, steps))
    return found


def row_of(
    rows: int, adapters: str, found: Mapping[str, list[tuple[float, float]]]
) -> dict[str, Any]:
    pairs = zip(found[ONE], found[TWO], strict=True)
    return {
        "rows": rows,
        "adapters": adapters,
        "one_ms": 1e3 * statistics.median(seconds for seconds, _ in found[ONE]),
        "two_ms": 1e3 * statistics.median(seconds for seconds, _ in found[TWO]),
        "two_of_one": statistics.median(two[0] / one[0] for one, two in pairs),
        "waiting": statistics.median(share for _, share in found[TWO]),
    }


def table(rows: list[dict[str, Any]]) -> str:
    head = ["rows", "adapters", "one rank, ms", "two ranks, ms", "two of one", "waiting"]
    cells = [
        [
            str(row["rows"]),
            row["adapters"],
            f"{row['one_ms']:.1f}",
            f"{row['two_ms']:.1f}",
            f"{row['two_of_one']:.2f}",
            f"{row['waiting']:.0%}",
        ]
        for row in rows
    ]
    return markdown_table(head, cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="small", help="tiny (56M) or small (853M)")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        fixture = Fixture(find_shape(arguments.model), Path(name))
        fixture.ensure_model()
        adapters = {a.name: a.path for a in fixture.adapters(RANK_8, max(ROWS))}
        engines = {
            kind: stack.enter_context(
                LLM(
                    fixture.model,
                    adapters,
                    engine="process",
                    state_dir=Path(name) / f"state-{number}",
                    dtype="bfloat16",
                    max_num_seqs=max(ROWS),
                    max_model_len=256,
                    enable_prefix_cache=False,
                    **settings,
                )
            )
            for number, (kind, settings) in enumerate(KINDS.items())
        }
        report = []
        for rows in ROWS:
            for label, names in (("none", None), ("one a row", list(adapters)[:rows])):
                found = measure(engines, rows, names, arguments.rounds, arguments.steps)
                report.append(row_of(rows, label, found))
                print(table(report[-1:]).splitlines()[-1], flush=True)
    print(table(report))
    if arguments.write:
        write_report("ranks", "Two ranks and one on the same two cores", report, table(report))


if __name__ == "__main__":
    main()
