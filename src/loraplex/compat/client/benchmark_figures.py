"""The core benchmark's figures of a run, as a table, as CSV and as a Perfetto trace."""

import csv
import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path

from loraplex.compat.client.table import table
from loraplex.core.errors import ConfigError

PERFETTO_FILE = "prfetto_dump.json"
"""So spelled by the original."""
_MICROSECONDS = 1e6
_MILLISECONDS = 1e3


@dataclasses.dataclass(frozen=True, slots=True)
class TimedRequest:
    """Times are seconds of one clock."""

    start: float
    end: float
    num_input_tokens: int
    num_output_tokens: int

    @property
    def latency_ms(self) -> float:
        return (self.end - self.start) * _MILLISECONDS


@dataclasses.dataclass(frozen=True, slots=True)
class Figures:
    requests_per_second: float
    output_tokens_per_second: float
    average_latency_ms: float
    p99_latency_ms: float
    p90_latency_ms: float
    average_input_tokens: float
    average_output_tokens: float
    average_in_flight: float
    """Requests in work at a time. The original has 0 here."""
    total_latency_ms: float
    """From the first start to the last end."""
    num_requests: int

    def lines(self) -> list[str]:
        """The table that the founding example shows."""
        rows = (
            ("Requests/Sec", self.requests_per_second),
            ("OP tokens/sec", self.output_tokens_per_second),
            ("Avg. latency (ms)", self.average_latency_ms),
            ("P99 latency (ms)", self.p99_latency_ms),
            ("P90 latency (ms)", self.p90_latency_ms),
            ("Avg. IP tokens per request", self.average_input_tokens),
            ("Avg. OP tokens per request", self.average_output_tokens),
            ("Total latency (ms)", self.total_latency_ms),
            ("Total requests", self.num_requests),
        )
        return table(("Stat", "Value"), [(name, f"{value:.2f}") for name, value in rows])

    def write_csv(self, path: str) -> None:
        """A header and a row. Raises ConfigError."""
        columns = {
            "Requests/Sec": self.requests_per_second,
            "OP tokens/sec": self.output_tokens_per_second,
            "Avg. latency (ms)": self.average_latency_ms,
            "P99 latency (ms)": self.p99_latency_ms,
            "P90 latency (ms)": self.p90_latency_ms,
            "Avg. Input tokens per request": self.average_input_tokens,
            "Avg. Output tokens per request": self.average_output_tokens,
            "Avg. InFlight requests": self.average_in_flight,
            "Total latency (ms)": self.total_latency_ms,
            "Total requests": self.num_requests,
        }
        try:
            with Path(path).open("w", newline="", encoding="utf-8") as file:
                writer = csv.writer(file)
                writer.writerow(columns)
                writer.writerow(f"{value:.2f}" for value in columns.values())
        except OSError as error:
            raise ConfigError(f"--op-stats-csv: {error}") from error


def figures_of(requests: Sequence[TimedRequest]) -> Figures:
    """requests: at least one."""
    latencies = sorted(request.latency_ms for request in requests)
    num = len(requests)
    begin = min(request.start for request in requests)
    seconds = max(max(request.end for request in requests) - begin, 1e-9)
    num_output = sum(request.num_output_tokens for request in requests)
    return Figures(
        requests_per_second=num / seconds,
        output_tokens_per_second=num_output / seconds,
        average_latency_ms=sum(latencies) / num,
        p99_latency_ms=latencies[math.ceil(num * 0.99) - 1],
        p90_latency_ms=latencies[math.ceil(num * 0.90) - 1],
        average_input_tokens=sum(request.num_input_tokens for request in requests) / num,
        average_output_tokens=num_output / num,
        average_in_flight=sum(latencies) / _MILLISECONDS / seconds,
        total_latency_ms=seconds * _MILLISECONDS,
        num_requests=num,
    )


def write_perfetto(requests: Sequence[TimedRequest], path: Path) -> None:
    """A trace of complete events, by the format of Chrome's about:tracing. Raises ConfigError."""
    begin = min(request.start for request in requests)
    events = [
        {
            "name": f"req_{index}",
            "cat": "batch",
            "ph": "X",
            "ts": (request.start - begin) * _MICROSECONDS,
            "dur": (request.end - request.start) * _MICROSECONDS,
            "pid": "1",
            "args": {"isl": request.num_input_tokens, "osl": request.num_output_tokens},
        }
        for index, request in enumerate(requests)
    ]
    try:
        path.write_text(json.dumps({"traceEvents": events}), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--dump-perfetto-trace: {error}") from error
