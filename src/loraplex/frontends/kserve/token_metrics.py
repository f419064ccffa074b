"""Tokens and times of finished requests, by the names of the TensorRT-LLM and vLLM backends.

Families nv_llm_* and vllm:*, labelled as there with the Triton model and its version. A request
adds to plain numbers; a scrape makes families of them.
"""

import bisect
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

import msgspec
from prometheus_client.core import Metric
from prometheus_client.utils import floatToGoString

from loraplex.frontends.metric_families import (
    Family,
    TableCollector,
    collected,
    counter,
    histogram,
)

LABELS = ("model", "version")
_written: Callable[[float], str] = floatToGoString
"""How prometheus_client writes a bound."""
_TTFT_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0),
)
_PER_TOKEN_BUCKETS = (*(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5),)
_E2E_BUCKETS = (1.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0)
_TOKEN_BUCKETS = (
    *(1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000),
    *(100_000, 200_000, 500_000, 1_000_000),
)


class Histogram:
    """How many values were at most each bound, and their sum. A counter has no bounds."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self._counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    def add(self, value: float, count: int = 1) -> None:
        """The same value `count` times."""
        if count > 0:
            self._counts[bisect.bisect_left(self.bounds, value)] += count
            self.sum += value * count

    def cumulative(self) -> list[tuple[str, float]]:
        """(bound, values up to it), with +Inf in the end."""
        totals = itertools.accumulate(self._counts)
        return [
            (_written(bound), float(total))
            for bound, total in zip((*self.bounds, math.inf), totals, strict=True)
        ]


class TokenTimes(msgspec.Struct, frozen=True):
    """Tokens and times of one finished batch element."""

    num_prompt_tokens: int
    num_output_tokens: int
    """Total over all its sequences."""
    num_sequences: int
    first_token_seconds: float | None = None
    """Time since its arrival; None if the engine did not report it."""
    seconds_per_token: float | None = None
    """After the first token."""
    total_seconds: float | None = None
    queue_seconds: float = 0.0
    """Time until its first step."""


class TokenLabels(msgspec.Struct, frozen=True):
    """(model, version) that a request counts for; None: it has no such families."""

    trtllm: tuple[str, str] | None = None
    vllm: tuple[str, str] | None = None


class _TokenRow(NamedTuple):
    """A family, and what it has of a finished element."""

    name: str
    text: str
    value: str
    """Field of TokenTimes; None in it is not counted."""
    bounds: Sequence[float] = ()
    """Upper bounds of its buckets; none: a counter."""
    label: tuple[str, str] | None = None
    """Name and value of one more label."""


_PER_TOKEN: Final = "seconds_per_token"
_TRTLLM_TEXT = "TRT LLM response metrics"
_TRTLLM_BUCKETS = (10, 50, 100, 500, 1000)
_PREFILL_TEXT = "Number of prefill tokens processed."
_OUTPUT_TEXT = "Number of generation tokens processed."
_ROWS: Final = {
    "trtllm": tuple(
        _TokenRow(
            f"nv_llm_{name}_token_len",
            _TRTLLM_TEXT,
            field,
            _TRTLLM_BUCKETS,
            ("response_metric_type", f"total_{name}_tokens"),
        )
        for name, field in (("input", "num_prompt_tokens"), ("output", "num_output_tokens"))
    ),
    "vllm": (
        _TokenRow("vllm:prompt_tokens", _PREFILL_TEXT, "num_prompt_tokens"),
        _TokenRow("vllm:generation_tokens", _OUTPUT_TEXT, "num_output_tokens"),
        _TokenRow(
            "vllm:time_to_first_token_seconds",
            "Histogram of time to first token in seconds.",
            "first_token_seconds",
            _TTFT_BUCKETS,
        ),
        _TokenRow(
            "vllm:time_per_output_token_seconds",
            "Histogram of time per output token in seconds.",
            _PER_TOKEN,
            _PER_TOKEN_BUCKETS,
        ),
        _TokenRow(
            "vllm:e2e_request_latency_seconds",
            "Histogram of end to end request latency in seconds.",
            "total_seconds",
            _E2E_BUCKETS,
        ),
        _TokenRow("vllm:request_prompt_tokens", _PREFILL_TEXT, "num_prompt_tokens", _TOKEN_BUCKETS),
        _TokenRow(
            "vllm:request_generation_tokens", _OUTPUT_TEXT, "num_output_tokens", _TOKEN_BUCKETS
        ),
        _TokenRow(
            "vllm:request_params_n",
            "Histogram of the n request parameter.",
            "num_sequences",
            (1, 2, 5, 10, 20),
        ),
    ),
}
"""Families by the field of TokenLabels."""


def _family(index: int, row: _TokenRow) -> Family:
    """Return the family of a row; its subjects are lists of Histograms, one for each row."""
    if not row.bounds:
        return counter(row.name, row.text, lambda sums: sums[index].sum)
    if row.label is None:
        return histogram(row.name, row.text, lambda sums: _buckets(sums[index]))
    name, value = row.label
    return histogram(row.name, row.text, {value: lambda sums: _buckets(sums[index])}, (name,))


def _buckets(values: Histogram) -> tuple[list[tuple[str, float]], float]:
    return values.cumulative(), values.sum


_FAMILIES: Final = {
    kind: tuple(_family(index, row) for index, row in enumerate(rows))
    for kind, rows in _ROWS.items()
}


class TokenMetrics(TableCollector):
    """All series, by (model, version)."""

    def __init__(self) -> None:
        self._series: dict[str, dict[tuple[str, ...], list[Histogram]]] = {
            kind: {} for kind in _ROWS
        }

    def collect(self) -> Iterator[Metric]:
        for kind, families in _FAMILIES.items():
            yield from collected(families, list(self._series[kind].items()), LABELS)

    def expect(self, labels: TokenLabels) -> None:
        """A model of the catalog: its families are there from the start, with zeros."""
        for kind in _ROWS:
            self._of(kind, labels)

    def observe(self, labels: TokenLabels, times: TokenTimes) -> None:
        """Count one finished element of a request to a model of the catalog."""
        num_later = times.num_output_tokens - times.num_sequences
        for kind, rows in _ROWS.items():
            for row, values in zip(rows, self._of(kind, labels), strict=False):
                value = getattr(times, row.value)
                if value is not None:
                    values.add(max(value, 0), num_later if row.value == _PER_TOKEN else 1)

    def _of(self, kind: str, labels: TokenLabels) -> list[Histogram]:
        """Return the values of a model, one for each row; none if it has no such families."""
        model = getattr(labels, kind)
        series = self._series[kind]
        if model is not None and model not in series:
            series[model] = [Histogram(row.bounds) for row in _ROWS[kind]]
        return series.get(model, [])
