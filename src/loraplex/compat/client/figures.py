"""The core benchmark's figures of a run, as a table, as CSV and as a Perfetto trace."""

import contextlib
import csv
import dataclasses
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from loraplex.core.errors import ConfigError

PERFETTO_FILE = "prfetto_dump.json"
"""The original's spelling."""
_CONCURRENCY = "Avg. InFlight requests"


@dataclasses.dataclass(frozen=True, slots=True)
class TimedRequest:
    """A request with its times in seconds of one clock."""

    start: float
    end: float
    num_input_tokens: int
    num_output_tokens: int

    @property
    def latency_ms(self) -> float:
        return (self.end - self.start) * 1e3


def figures_of(requests: Sequence[TimedRequest]) -> dict[str, float]:
    """Return the figures of the requests, at least one, by the table's names in its order."""
    latencies = sorted(request.latency_ms for request in requests)
    num = len(requests)
    begin = min(request.start for request in requests)
    seconds = max(max(request.end for request in requests) - begin, 1e-9)
    num_output = sum(request.num_output_tokens for request in requests)
    return {
        "Requests/Sec": num / seconds,
        "OP tokens/sec": num_output / seconds,
        "Avg. latency (ms)": sum(latencies) / num,
        "P99 latency (ms)": latencies[math.ceil(num * 0.99) - 1],
        "P90 latency (ms)": latencies[math.ceil(num * 0.90) - 1],
        "Avg. IP tokens per request": sum(r.num_input_tokens for r in requests) / num,
        "Avg. OP tokens per request": num_output / num,
        # Only in the CSV file. The original has 0 here.
        _CONCURRENCY: sum(latencies) / 1e3 / seconds,
        "Total latency (ms)": seconds * 1e3,
        "Total requests": num,
    }


def figure_table(figures: dict[str, float]) -> list[str]:
    """Return the lines of the founding example's table, with centred cells."""
    shown = [(name, f"{value:.2f}") for name, value in figures.items() if name != _CONCURRENCY]
    rows = [("Stat", "Value"), *shown]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rule = "+" + "+".join("-" * (width + 2) for width in widths) + "+"
    lines = [
        "|" + "|".join(f" {c:^{w}} " for c, w in zip(cells, widths, strict=True)) + "|"
        for cells in rows
    ]
    return [rule, lines[0], rule, *lines[1:], rule]


def write_csv(figures: dict[str, float], path: str) -> None:
    """Write a header and a row. Raises ConfigError."""
    names = [name.replace(" IP ", " Input ").replace(". OP ", ". Output ") for name in figures]
    with _write_errors("--op-stats-csv"), Path(path).open("w", newline="") as file:
        csv.writer(file).writerows([names, [f"{value:.2f}" for value in figures.values()]])


def write_perfetto(requests: Sequence[TimedRequest], path: Path) -> None:
    """Write complete events in the format of Chrome's about:tracing. Raises ConfigError."""
    begin = min(request.start for request in requests)
    events = [
        {
            "name": f"req_{index}",
            "cat": "batch",
            "ph": "X",
            "ts": (request.start - begin) * 1e6,
            "dur": (request.end - request.start) * 1e6,
            "pid": "1",
            "args": {"isl": request.num_input_tokens, "osl": request.num_output_tokens},
        }
        for index, request in enumerate(requests)
    ]
    with _write_errors("--dump-perfetto-trace"):
        path.write_text(json.dumps({"traceEvents": events}), encoding="utf-8")


@contextlib.contextmanager
def _write_errors(flag: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{flag}: {error}") from error
