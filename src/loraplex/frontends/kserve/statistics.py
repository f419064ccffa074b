"""What inference requests of each Triton model did, as the statistics extension shows it.

Queue: until the first step that computes the request. Input: reading the request. Output: making
answers. Infer: all the rest, so most of the time of a language model. A request of a batch is one
execution. Durations are nanoseconds; all runs on one event loop.
"""

import asyncio
import dataclasses
import enum
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from loraplex.core.errors import CapacityError, QueueFullError, RequestError
from loraplex.frontends.kserve.failures import FailedAnswer
from loraplex.frontends.kserve.latencies import FIRST_RESPONSE_BUCKETS_MS, Latencies
from loraplex.frontends.kserve.token_metrics import TokenLabels, TokenMetrics, TokenTimes

MAX_RESPONSE_STATS = 256
"""Of a stream, the answers that are counted each for itself."""


class FailureReason(enum.Enum):
    """The values of the label `reason` of nv_inference_request_failure."""

    REJECTED = "REJECTED"
    CANCELED = "CANCELED"
    BACKEND = "BACKEND"
    OTHER = "OTHER"


@dataclasses.dataclass(slots=True)
class Durations:
    """How often, and how long all together."""

    count: int = 0
    ns: int = 0

    def add(self, ns: int) -> None:
        self.count += 1
        if ns > 0:
            self.ns += ns

    def report(self) -> dict[str, int]:
        return {"count": self.count, "ns": self.ns}


@dataclasses.dataclass(slots=True)
class Phases:
    """Of requests that succeeded: how many, and how long each phase of them was all together."""

    count: int = 0
    input_ns: int = 0
    infer_ns: int = 0
    output_ns: int = 0

    def add(self, input_ns: int, infer_ns: int, output_ns: int, count: int = 1) -> None:
        self.count += count
        self.input_ns += input_ns
        self.infer_ns += infer_ns
        self.output_ns += output_ns

    @property
    def compute_input(self) -> Durations:
        return Durations(self.count, self.input_ns)

    @property
    def compute_infer(self) -> Durations:
        return Durations(self.count, self.infer_ns)

    @property
    def compute_output(self) -> Durations:
        return Durations(self.count, self.output_ns)

    def report(self) -> dict[str, Any]:
        return {
            "compute_input": self.compute_input.report(),
            "compute_infer": self.compute_infer.report(),
            "compute_output": self.compute_output.report(),
        }


@dataclasses.dataclass(slots=True)
class ResponseCounts:
    """Of the answers that were the same one of their streams."""

    success: Durations = dataclasses.field(default_factory=Durations)
    fail: Durations = dataclasses.field(default_factory=Durations)
    empty_response: Durations = dataclasses.field(default_factory=Durations)
    cancel: Durations = dataclasses.field(default_factory=Durations)

    def report(self) -> dict[str, Any]:
        return {
            "compute_infer": self.success.report(),
            "compute_output": Durations().report(),
            "success": self.success.report(),
            "fail": self.fail.report(),
            "empty_response": self.empty_response.report(),
            "cancel": self.cancel.report(),
        }


@dataclasses.dataclass(slots=True)
class ModelCounts:
    """Since the server started."""

    success: Durations = dataclasses.field(default_factory=Durations)
    fail: Durations = dataclasses.field(default_factory=Durations)
    queue: Durations = dataclasses.field(default_factory=Durations)
    by_batch_size: defaultdict[int, Phases] = dataclasses.field(
        default_factory=lambda: defaultdict(Phases)
    )
    by_response: defaultdict[int, ResponseCounts] = dataclasses.field(
        default_factory=lambda: defaultdict(ResponseCounts)
    )
    failures: dict[FailureReason, int] = dataclasses.field(
        default_factory=lambda: dict.fromkeys(FailureReason, 0)
    )
    num_inferences: int = 0
    """Elements of batches that were answered."""
    num_pending: int = 0
    """Requests that wait for their first step."""
    last_inference_ms: int = 0
    """Wall time, Unix milliseconds."""
    latencies: Latencies | None = None
    """None: nobody wants summaries or histograms."""

    @property
    def phases(self) -> Phases:
        """Of batches of all sizes."""
        total = Phases()
        for each in self.by_batch_size.values():
            total.add(each.input_ns, each.infer_ns, each.output_ns, each.count)
        return total


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
        """Of a model of the catalog; clients' other words never come here."""
        counts = self._counts.get(model)
        if counts is None:
            buckets = self._buckets.get(model, FIRST_RESPONSE_BUCKETS_MS)
            latencies = Latencies.of(buckets) if self._keeps_latencies else None
            counts = self._counts[model] = ModelCounts(latencies=latencies)
        return counts

    def report(self, model: str, version: str) -> dict[str, Any]:
        """One entry of `model_stats`, in the words of Triton's ModelStatistics."""
        counts = self.of(model)
        none = Durations().report()
        return {
            "name": model,
            "version": version,
            "last_inference": counts.last_inference_ms,
            "inference_count": counts.num_inferences,
            "execution_count": counts.success.count,
            "inference_stats": {
                "success": counts.success.report(),
                "fail": counts.fail.report(),
                "queue": counts.queue.report(),
                **counts.phases.report(),
                "cache_hit": none,
                "cache_miss": none,
            },
            "response_stats": {
                str(index): each.report() for index, each in sorted(counts.by_response.items())
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
        self, statistics: Statistics, model: str, labels: TokenLabels | None = None
    ) -> None:
        self._counts = statistics.of(model)
        self._tokens = statistics.token_metrics
        self._labels = labels or TokenLabels()
        self._start_ns = self._last_ns = time.monotonic_ns()
        self._input_ns = 0
        self._output_ns = 0
        self._num_responses = 0
        self._is_pending = True
        self._is_over = False
        self._counts.num_pending += 1

    def __enter__(self) -> "Recording":
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if error is not None:
            self.failed(error)

    def read(self) -> None:
        """The request has been read and checked; from here on the engine has it."""
        self._input_ns = time.monotonic_ns() - self._start_ns

    def begun(self) -> None:
        """Something has been computed."""
        if self._is_pending:
            self._is_pending = False
            self._counts.num_pending -= 1

    def made_output(self, ns: int) -> None:
        """So long it took to make an answer."""
        self._output_ns += ns

    def responded(self, *, is_empty: bool) -> None:
        """An answer of a stream is about to go."""
        now_ns = time.monotonic_ns()
        ns, self._last_ns = now_ns - self._last_ns, now_ns
        each = self._response()
        if not self._num_responses:
            self._first_response(now_ns)
        self._num_responses += 1
        if each is None:
            return
        if is_empty:
            each.empty_response.add(ns)
        else:
            each.success.add(ns)

    def uncounted(self) -> None:
        """It asked for no inference."""
        self._end()

    def succeeded(
        self, batch_size: int, queue_ns: int = 0, times: Iterable[TokenTimes] = ()
    ) -> None:
        if not self._end():
            return
        total_ns = time.monotonic_ns() - self._start_ns
        counts = self._counts
        queue_ns = min(queue_ns, total_ns)
        infer_ns = max(total_ns - queue_ns - self._input_ns - self._output_ns, 0)
        counts.success.add(total_ns)
        counts.queue.add(queue_ns)
        if counts.latencies is not None:
            compute = (self._input_ns, infer_ns, self._output_ns)
            counts.latencies.add(total_ns, queue_ns, compute)
        if not self._num_responses:
            self._first_response(self._start_ns + total_ns)
        counts.by_batch_size[batch_size].add(self._input_ns, infer_ns, self._output_ns)
        counts.num_inferences += batch_size
        counts.last_inference_ms = time.time_ns() // 1_000_000
        for each in times:
            self._tokens.observe(self._labels, each)

    def failed(self, error: BaseException | None) -> None:
        """None: its client has gone, or closed its answers."""
        if not self._end():
            return
        ns = time.monotonic_ns() - self._start_ns
        reason = failure_reason(error)
        self._counts.fail.add(ns)
        self._counts.failures[reason] += 1
        each = self._response() if self._num_responses else None
        if each is not None:
            cancelled = reason is FailureReason.CANCELED
            (each.cancel if cancelled else each.fail).add(time.monotonic_ns() - self._last_ns)

    def _first_response(self, now_ns: int) -> None:
        if self._counts.latencies is not None:
            ms = (now_ns - self._start_ns) / 1_000_000
            self._counts.latencies.first_response.add(ms)

    def _response(self) -> ResponseCounts | None:
        """Of the answer that comes next."""
        if self._num_responses >= MAX_RESPONSE_STATS:
            return None
        return self._counts.by_response[self._num_responses]

    def _end(self) -> bool:
        """Whether this is the first end."""
        is_first = not self._is_over
        self._is_over = True
        self.begun()
        return is_first


def failure_reason(error: BaseException | None) -> FailureReason:
    if isinstance(error, FailedAnswer):
        error = error.error
    if error is None or isinstance(error, asyncio.CancelledError | GeneratorExit):
        return FailureReason.CANCELED
    if isinstance(error, QueueFullError):
        return FailureReason.REJECTED
    is_outside = isinstance(error, RequestError | CapacityError)
    return FailureReason.OTHER if is_outside else FailureReason.BACKEND
