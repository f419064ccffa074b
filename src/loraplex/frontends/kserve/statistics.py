"""What inference requests of each Triton model did, as the statistics extension shows it.

Queue: until the first step that computes the request. Input: reading the request. Output: making
responses. Infer: all the rest, so most of the time of a language model. A request of a batch is one
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
from loraplex.frontends.kserve.failures import FailedResponse
from loraplex.frontends.kserve.latencies import FIRST_RESPONSE_BUCKETS_MS, Latencies
from loraplex.frontends.kserve.token_metrics import TokenLabels, TokenMetrics, TokenTimes

MAX_RESPONSE_STATS = 256
"""Maximum number of a stream's responses that are counted each for itself."""


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
    """Number of requests that succeeded, and the total duration of each of their phases."""

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
    """Counts of the responses that had the same index in their streams."""

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
    """Number of batch elements that got a response."""
    num_pending: int = 0
    """Requests that wait for their first step."""
    last_inference_ms: int = 0
    """Wall time, Unix milliseconds."""
    latencies: Latencies | None = None
    """None: neither summaries nor histograms are enabled."""

    def succeeded(
        self, batch_size: int, total_ns: int, queue_ns: int, compute_ns: tuple[int, int, int]
    ) -> None:
        """Count one request; compute_ns: input, inference, output."""
        self.success.add(total_ns)
        self.queue.add(queue_ns)
        if self.latencies is not None:
            self.latencies.add(total_ns, queue_ns, compute_ns)
        self.by_batch_size[batch_size].add(*compute_ns)
        self.num_inferences += batch_size
        self.last_inference_ms = time.time_ns() // 1_000_000

    def failed(self, ns: int, reason: FailureReason) -> None:
        self.fail.add(ns)
        self.failures[reason] += 1

    def first_response(self, ns: int) -> None:
        """So long after its request."""
        if self.latencies is not None:
            self.latencies.first_response.add(ns / 1_000_000)

    @property
    def phases(self) -> Phases:
        """Total over batches of all sizes."""
        total = Phases()
        for each in self.by_batch_size.values():
            total.add(each.input_ns, each.infer_ns, each.output_ns, each.count)
        return total


@dataclasses.dataclass(frozen=True, slots=True)
class StepCounts:
    """Counts of the models that an ensemble passes its requests through.

    No tensors pass between them here: one path does the work of all. So that dashboards of
    tensorrt_llm see all that it computes, what a request took is shared out: queueing and inferring
    are tensorrt_llm's, reading the request is preprocessing's, making outputs postprocessing's.
    """

    preprocessing: ModelCounts
    tensorrt_llm: ModelCounts
    postprocessing: ModelCounts

    def succeeded(self, batch_size: int, queue_ns: int, compute_ns: tuple[int, int, int]) -> None:
        """Count one request, as ModelCounts.succeeded does for the ensemble."""
        input_ns, infer_ns, output_ns = compute_ns
        self.preprocessing.succeeded(batch_size, input_ns, 0, (input_ns, 0, 0))
        self.tensorrt_llm.succeeded(batch_size, queue_ns + infer_ns, queue_ns, (0, infer_ns, 0))
        self.postprocessing.succeeded(batch_size, output_ns, 0, (0, 0, output_ns))


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
            latencies = Latencies.of(buckets) if self._keeps_latencies else None
            counts = self._counts[model] = ModelCounts(latencies=latencies)
        return counts

    def steps(self, names: Mapping[str, str]) -> StepCounts | None:
        """names: of models, by their fields of StepCounts; what a step that has no name counts is
        shown nowhere. None without any names.
        """
        if not names:
            return None
        steps = [field.name for field in dataclasses.fields(StepCounts)]
        return StepCounts(*(self.of(names[s]) if s in names else ModelCounts() for s in steps))

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
        self,
        statistics: Statistics,
        model: str,
        labels: TokenLabels | None = None,
        steps: StepCounts | None = None,
    ) -> None:
        """steps: of an ensemble, the models that count the request, too."""
        self._counts = statistics.of(model)
        self._steps = steps
        self._tokens = statistics.token_metrics
        self._labels = labels or TokenLabels()
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
        if self._steps is not None:
            self._steps.tensorrt_llm.num_pending += 1

    def begun(self) -> None:
        """Something has been computed."""
        if self._is_pending:
            self._is_pending = False
            self._counts.num_pending -= 1
            if self._steps is not None and self._is_read:
                self._steps.tensorrt_llm.num_pending -= 1

    def made_output(self, ns: int) -> None:
        """Add the time that it took to make a response."""
        self._output_ns += ns

    def responded(self, *, is_empty: bool) -> None:
        """Count a response of a stream that is about to be sent."""
        now_ns = time.monotonic_ns()
        ns, self._last_ns = now_ns - self._last_ns, now_ns
        each = self._response()
        if not self._num_responses:
            self._first_response(now_ns - self._start_ns)
        self._num_responses += 1
        if each is None:
            return
        if is_empty:
            each.empty_response.add(ns)
        else:
            each.success.add(ns)

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
        if self._steps is not None:
            self._steps.succeeded(batch_size, queue_ns, compute_ns)
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
        if self._steps is not None and self._is_read:
            self._steps.tensorrt_llm.failed(ns - self._input_ns, reason)
        each = self._response() if self._num_responses else None
        if each is not None:
            (each.cancel if self.was_cancelled else each.fail).add(
                time.monotonic_ns() - self._last_ns
            )

    def _first_response(self, ns: int) -> None:
        self._counts.first_response(ns)
        if self._steps is not None:
            self._steps.tensorrt_llm.first_response(ns - self._input_ns)

    def _response(self) -> ResponseCounts | None:
        """Counts of the next response."""
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
    if isinstance(error, FailedResponse):
        error = error.error
    if error is None or isinstance(error, asyncio.CancelledError | GeneratorExit):
        return FailureReason.CANCELED
    if isinstance(error, QueueFullError):
        return FailureReason.REJECTED
    is_outside = isinstance(error, RequestError | CapacityError)
    return FailureReason.OTHER if is_outside else FailureReason.BACKEND
