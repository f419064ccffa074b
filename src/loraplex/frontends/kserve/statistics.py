"""What inference requests of each Triton model did, as the statistics extension shows it.

Queue: until the first step that computes the request. Input: reading the request. Output: making
responses. Infer: all the rest, so most of the time of a language model. A request of a batch is one
execution. Durations are nanoseconds; all runs on one event loop.

Tokens and times of finished requests are counted by the names of the TensorRT-LLM and vLLM
backends: families nv_llm_* and vllm:*, labelled as there with the Triton model and its version. A
request adds to plain numbers; a scrape makes families of them.
"""

import asyncio
import bisect
import dataclasses
import enum
import itertools
import math
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import msgspec
from prometheus_client.core import Metric
from prometheus_client.utils import floatToGoString

from loraplex.core.errors import CapacityError, ConfigError, QueueFullError, RequestError
from loraplex.frontends.kserve.errors import FailedResponse
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


MAX_RESPONSE_STATS = 256
"""Maximum number of a stream's responses that are counted each for itself."""
WINDOW_SECONDS = 60.0
"""Window of a summary: the default of Triton's library, prometheus-cpp."""
MAX_VALUES = 10_000
"""Values per window: the newest ones are kept."""
FIRST_RESPONSE: Final = "nv_inference_first_response_histogram_ms"
"""The family of the histogram that models may have buckets of their own for."""
FIRST_RESPONSE_BUCKETS_MS = (100.0, 500.0, 2000.0, 5000.0)

_PHASES = ("compute_input", "compute_infer", "compute_output")
_SPANS = ("success", "queue", *_PHASES)
"""Durations of a request that succeeded; `success` is the whole."""
_OF_MODEL = ("success", "fail", "queue", *_PHASES, "cache_hit", "cache_miss")
_OF_RESPONSE = ("success", "fail", "empty_response", "cancel")
_STEPS = ("preprocessing", "tensorrt_llm", "postprocessing")


class FailureReason(enum.Enum):
    """The values of the label `reason` of nv_inference_request_failure."""

    REJECTED = "REJECTED"
    CANCELED = "CANCELED"
    BACKEND = "BACKEND"
    OTHER = "OTHER"


class RecentValues:
    """Values of the last WINDOW_SECONDS, for quantiles."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._values: deque[tuple[float, float]] = deque(maxlen=MAX_VALUES)

    def add(self, value: float) -> None:
        self._values.append((self._clock(), value))

    def quantiles(self, quantiles: Sequence[float]) -> list[float]:
        """The nearest ranks; NaN where nothing is left of the window."""
        oldest = self._clock() - WINDOW_SECONDS
        while self._values and self._values[0][0] < oldest:
            self._values.popleft()
        ordered = sorted(value for _, value in self._values)
        if not ordered:
            return [math.nan] * len(quantiles)
        return [ordered[math.ceil(quantile * len(ordered)) - 1] for quantile in quantiles]


@dataclasses.dataclass(slots=True)
class TotalTime:
    """How often, and how long all together."""

    count: int = 0
    ns: int = 0

    def add(self, ns: int) -> None:
        self.count += 1
        self.ns += max(ns, 0)


class _Times(dict[str, TotalTime]):
    """Total times by the names of the statistics extension."""

    def __init__(self, names: Iterable[str]) -> None:
        super().__init__({name: TotalTime() for name in names})

    def report(self) -> dict[str, dict[str, int]]:
        return {name: dataclasses.asdict(total) for name, total in self.items()}


class ModelCounts:
    """Since the server started."""

    def __init__(self, first_response_buckets: Sequence[float] | None = None) -> None:
        """first_response_buckets: in milliseconds; None: neither summaries nor histograms."""
        self.times = _Times(_OF_MODEL)
        self.by_batch_size: defaultdict[int, _Times] = defaultdict(lambda: _Times(_PHASES))
        self.by_response: defaultdict[int, _Times] = defaultdict(lambda: _Times(_OF_RESPONSE))
        self.failures = dict.fromkeys(FailureReason, 0)
        self.num_inferences = 0
        """Number of batch elements that got a response."""
        self.num_pending = 0
        """Requests that wait for their first step."""
        self.last_inference_ms = 0
        """Wall time, Unix milliseconds."""
        has_latencies = first_response_buckets is not None
        self.windows = {name: RecentValues() for name in (_SPANS if has_latencies else ())}
        """Microseconds of requests that succeeded."""
        self.first_responses = Histogram(first_response_buckets or ())
        """Milliseconds until the first response."""

    def succeeded(
        self, batch_size: int, total_ns: int, queue_ns: int, compute_ns: tuple[int, int, int]
    ) -> None:
        """Count one request; compute_ns: input, inference, output."""
        for name, ns in zip(_SPANS, (total_ns, queue_ns, *compute_ns), strict=True):
            self.times[name].add(ns)
            if self.windows:
                self.windows[name].add(ns // 1000)
            if name in _PHASES:
                self.by_batch_size[batch_size][name].add(ns)
        self.num_inferences += batch_size
        self.last_inference_ms = time.time_ns() // 1_000_000

    def failed(self, ns: int, reason: FailureReason) -> None:
        self.times["fail"].add(ns)
        self.failures[reason] += 1

    def first_response(self, ns: int) -> None:
        """So long after its request."""
        if self.windows:
            self.first_responses.add(ns / 1_000_000)


StepCounts = Mapping[str, ModelCounts]
"""Counts of the models that an ensemble passes its requests through, by kind.

No tensors pass between them here: one path does the work of all. So that dashboards of tensorrt_llm
see all that it computes, what a request took is shared out: queueing and inferring are
tensorrt_llm's, reading the request is preprocessing's, making outputs postprocessing's.
"""


class Statistics:
    def __init__(
        self,
        *,
        keeps_latencies: bool = False,
        first_response_buckets: Mapping[str, Sequence[float]] = MappingProxyType({}),
    ) -> None:
        """first_response_buckets: of models that have other ones than Triton's."""
        self._keeps_latencies = keeps_latencies
        self._buckets = first_response_buckets
        self.token_metrics = TokenMetrics()
        self._counts: dict[str, ModelCounts] = {}

    def of(self, model: str) -> ModelCounts:
        """Counts of a model of the catalog; unknown names are refused earlier."""
        counts = self._counts.get(model)
        if counts is None:
            buckets = self._buckets.get(model, FIRST_RESPONSE_BUCKETS_MS)
            counts = ModelCounts(buckets if self._keeps_latencies else None)
            self._counts[model] = counts
        return counts

    def steps(self, names: Mapping[str, str]) -> StepCounts:
        """names: of models, by kind; what a step that has no name counts is shown nowhere. Empty
        without any names.
        """
        steps = _STEPS if names else ()
        return {step: self.of(names[step]) if step in names else ModelCounts() for step in steps}

    def report(self, model: str, version: str) -> dict[str, Any]:
        """One entry of `model_stats`, in the words of Triton's ModelStatistics."""
        counts = self.of(model)
        return {
            "name": model,
            "version": version,
            "last_inference": counts.last_inference_ms,
            "inference_count": counts.num_inferences,
            "execution_count": counts.times["success"].count,
            "inference_stats": counts.times.report(),
            "response_stats": {
                str(index): {
                    "compute_infer": dataclasses.asdict(each["success"]),
                    "compute_output": dataclasses.asdict(TotalTime()),
                    **each.report(),
                }
                for index, each in sorted(counts.by_response.items())
            },
            "batch_stats": [
                {"batch_size": size, **phases.report()}
                for size, phases in sorted(counts.by_batch_size.items())
            ],
            "memory_usage": [],
        }


class Recording:
    """One request, from its arrival to its end. The first end counts, others do nothing.

    As a context it ends with the error that leaves it, and else goes on.
    """

    def __init__(
        self, tokens: TokenMetrics, counts: ModelCounts, labels: TokenLabels, steps: StepCounts
    ) -> None:
        """steps: of an ensemble, the models that count the request, too."""
        self._counts = counts
        self._steps = steps
        self._core = steps.get("tensorrt_llm")
        self._tokens = tokens
        self._labels = labels
        self._start_ns = self._last_ns = time.monotonic_ns()
        self._input_ns = 0
        self._output_ns = 0
        self._num_responses = 0
        self._is_pending = True
        self._is_read = False
        self._is_over = False
        self.was_cancelled = False
        """Whether the first end was that its client left."""
        self._counts.num_pending += 1

    def __enter__(self) -> "Recording":
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if error is not None:
            self.failed(error)

    def read(self) -> None:
        """The request has been read and checked; from here on the engine has it."""
        self._input_ns = time.monotonic_ns() - self._start_ns
        self._is_read = True
        if self._core is not None:
            self._core.num_pending += 1

    def begun(self) -> None:
        """Something has been computed."""
        if self._is_pending:
            self._is_pending = False
            self._counts.num_pending -= 1
            if self._core is not None and self._is_read:
                self._core.num_pending -= 1

    def made_output(self, ns: int) -> None:
        """Add the time that it took to make a response."""
        self._output_ns += ns

    def responded(self, *, is_empty: bool) -> None:
        """Count a response of a stream that is about to be sent."""
        now_ns = time.monotonic_ns()
        ns, self._last_ns = now_ns - self._last_ns, now_ns
        if not self._num_responses:
            self._first_response(now_ns - self._start_ns)
        self._count_response("empty_response" if is_empty else "success", ns)
        self._num_responses += 1

    def uncounted(self) -> None:
        """Do not count the request: it needed no inference."""
        self._end()

    def succeeded(
        self, batch_size: int, queue_ns: int = 0, times: Iterable[TokenTimes] = ()
    ) -> None:
        if not self._end():
            return
        total_ns = time.monotonic_ns() - self._start_ns
        queue_ns = min(queue_ns, total_ns)
        infer_ns = max(total_ns - queue_ns - self._input_ns - self._output_ns, 0)
        compute_ns = (self._input_ns, infer_ns, self._output_ns)
        if not self._num_responses:
            self._first_response(total_ns)
        self._counts.succeeded(batch_size, total_ns, queue_ns, compute_ns)
        if self._steps:
            # Which step, its time in all, in the queue and in its phases: see StepCounts.
            first, core, last = (self._steps[step] for step in _STEPS)
            first.succeeded(batch_size, self._input_ns, 0, (self._input_ns, 0, 0))
            core.succeeded(batch_size, queue_ns + infer_ns, queue_ns, (0, infer_ns, 0))
            last.succeeded(batch_size, self._output_ns, 0, (0, 0, self._output_ns))
        for each in times:
            self._tokens.observe(self._labels, each)

    def failed(self, error: BaseException | None) -> None:
        """Count a failed request; None: its client disconnected, or closed its stream."""
        if not self._end():
            return
        ns = time.monotonic_ns() - self._start_ns
        reason = failure_reason(error)
        self.was_cancelled = reason is FailureReason.CANCELED
        self._counts.failed(ns, reason)
        if self._core is not None and self._is_read:
            self._core.failed(ns - self._input_ns, reason)
        if self._num_responses:
            outcome = "cancel" if self.was_cancelled else "fail"
            self._count_response(outcome, time.monotonic_ns() - self._last_ns)

    def _first_response(self, ns: int) -> None:
        self._counts.first_response(ns)
        if self._core is not None:
            self._core.first_response(ns - self._input_ns)

    def _count_response(self, outcome: str, ns: int) -> None:
        """Count the next response."""
        if self._num_responses < MAX_RESPONSE_STATS:
            self._counts.by_response[self._num_responses][outcome].add(ns)

    def _end(self) -> bool:
        """Whether this is the first end."""
        is_first = not self._is_over
        self._is_over = True
        self.begun()
        return is_first


def failure_reason(error: BaseException | None) -> FailureReason:
    if isinstance(error, FailedResponse):
        error = error.error
    if error is None or isinstance(error, asyncio.CancelledError | GeneratorExit):
        return FailureReason.CANCELED
    if isinstance(error, QueueFullError):
        return FailureReason.REJECTED
    is_outside = isinstance(error, RequestError | CapacityError)
    return FailureReason.OTHER if is_outside else FailureReason.BACKEND


def first_response_buckets(
    model: str, config: Mapping[str, Any] | None
) -> tuple[float, ...] | None:
    """Read `model_metrics` of a configuration: upper bounds in milliseconds; None: it has none.

    Fields: ModelMetrics of model_config.proto. Histograms of other servers are ignored. Raises
    ConfigError for bounds that do not grow.
    """
    section = (config or {}).get("model_metrics") or {}
    for control in section.get("metric_control", ()):
        if control.get("metric_identifier", {}).get("family") != FIRST_RESPONSE:
            continue
        bounds = tuple(map(float, control.get("histogram_options", {}).get("buckets", ())))
        if not all(low < high for low, high in itertools.pairwise(bounds)):
            raise ConfigError(
                f"model {model!r}: model_metrics: the buckets of {FIRST_RESPONSE} must grow from "
                f"one to the next, got {', '.join(f'{bound:g}' for bound in bounds)}"
            )
        if bounds:
            return bounds
    return None
