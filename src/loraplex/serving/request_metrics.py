"""What requests did, as Prometheus counters and histograms. How they are exposed is the front
ends' matter; what engines do comes from `EngineStats`.

One event loop calls it. Label values that clients choose are bounded: adapters by number, models
to those that are served.
"""

import contextlib
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Histogram

from loraplex.core.clock import Clock, SystemClock
from loraplex.core.errors import LoraplexError
from loraplex.core.output import FinishReason, RequestOutput, ResolvedAdapter
from loraplex.core.principal import Principal
from loraplex.core.request import GenerateRequest
from loraplex.core.task import Generate
from loraplex.serving.access.tenant_limits import Endable
from loraplex.serving.wire_request import GenerationRecord, current_request

MAX_LABELS = 100
"""Maximum number of adapters, and of tenants, that are labels of their own."""
OTHERS = "other"
_OBSERVED_NS = 100_000_000
"""Interval at which tokens are counted: one by one that takes as long as their text."""

TTFT_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 30.0, 60.0),
)
INTER_TOKEN_BUCKETS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5),
    *(0.75, 1.0, 2.5),
)
REQUEST_BUCKETS = (
    *(0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0),
    *(60.0, 120.0, 300.0),
)
_FEW_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
"""Fewer: there is a set of them for every adapter and every tenant."""
_QUEUE_BUCKETS = (0.0005, 0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class AdmittedOutputs(Protocol):
    """An admitted request's outputs: an iterator that can be closed, which aborts the request."""

    async def __anext__(self) -> RequestOutput: ...

    async def aclose(self) -> None: ...

    def cancel(self) -> None: ...

    @property
    def adapters(self) -> tuple[ResolvedAdapter, ...]: ...

    @property
    def num_prompt_tokens(self) -> int: ...

    def when_ready(self, read: Callable[[], bool]) -> None: ...

    def take_ready(self) -> RequestOutput | None: ...


class RequestMetrics:
    """Counters and histograms of all requests, in a registry of their own."""

    def __init__(self, models: Iterable[str] = (), clock: Clock | None = None) -> None:
        """`models`: names that errors may be labelled with before their first request is in."""
        self.registry = CollectorRegistry()
        self._clock = clock or SystemClock()
        self._models = set(models)
        self._adapter_labels: set[str] = set()
        self._tenant_labels: set[str] = set()
        by_adapter = ("model", "adapter")
        self.requests = self._counter(
            "requests", "Requests that ended, by their end.", (*by_adapter, "finish_reason")
        )
        self.prompt_tokens = self._counter("prompt_tokens", "Tokens of prompts.", by_adapter)
        self.generation_tokens = self._counter(
            "generation_tokens", "Tokens generated for clients.", by_adapter
        )
        self.errors = self._counter(
            "errors", "Requests refused or failed, by the code of the error.", ("model", "code")
        )
        self.time_to_first_token = self._histogram(
            "time_to_first_token_seconds", "From admission to the first token.", TTFT_BUCKETS
        )
        self.adapter_time_to_first_token = self._histogram(
            "adapter_time_to_first_token_seconds",
            "The same by adapter; empty for the base model.",
            _FEW_BUCKETS,
            by_adapter,
        )
        self.inter_token_latency = self._histogram(
            "inter_token_latency_seconds",
            "Between tokens of a sequence; tokens that come together share their time.",
            INTER_TOKEN_BUCKETS,
        )
        self._add_times()
        self.constrained_requests = self._counter(
            "constrained_requests", "Requests whose output must match a grammar.", ("model", "kind")
        )
        self.pooled_requests = self._counter(
            "pooled_requests",
            "Requests for a vector (embed), labels (classify) or a score of their prompt.",
            ("model", "task"),
        )
        self.restarted_requests = self._counter(
            "restarted_requests",
            "Requests that went on in another engine after theirs had died.",
            ("model",),
        )

    def _add_times(self) -> None:
        """Add the histograms of the time of a request and its parts."""
        self.e2e_latency = self._histogram(
            "e2e_request_latency_seconds",
            "From admission to the last output of requests that finished.",
            REQUEST_BUCKETS,
        )
        self.queue_time = self._histogram(
            "request_queue_time_seconds",
            "From arrival to the first step that computed the request.",
            _QUEUE_BUCKETS,
        )
        self.tenant_queue_time = self._histogram(
            "tenant_queue_time_seconds",
            "From arrival to the first step that computed the request, by tenant.",
            _FEW_BUCKETS,
            ("model", "tenant"),
        )
        self.prefill_time = self._histogram(
            "request_prefill_time_seconds",
            "From the first step that computed the request to its first token.",
            _QUEUE_BUCKETS,
        )
        self.adapter_wait_time = self._histogram(
            "request_adapter_wait_time_seconds",
            "From arrival until the last of the request's adapters was on the device.",
            _QUEUE_BUCKETS,
        )

    @contextlib.contextmanager
    def admission(
        self, request: GenerateRequest, principal: Principal
    ) -> Iterator[GenerationRecord]:
        """Begin the record of a request that is admitted inside, and count its refusal.

        It is a record of the current request of a client, if there is one.
        """
        record = GenerationRecord(request, principal.tenant, self._clock.now_ns())
        if (current := current_request()) is not None:
            current.tenant = current.tenant or principal.tenant
            current.generations.append(record)
        try:
            yield record
        except LoraplexError as error:
            self.observe_error(request.model, error)
            record.end(self._clock.now_ns(), error)
            raise

    def observe(
        self,
        request: GenerateRequest,
        outputs: AdmittedOutputs,
        record: GenerationRecord,
        lease: Endable,
    ) -> AsyncIterator[RequestOutput]:
        """Return the same outputs of a request which has just been admitted.

        What passes is counted, and noted in its record. The lease ends with them.
        """
        record.admitted(outputs.adapters, outputs.num_prompt_tokens, self._clock.now_ns())
        self._models.add(request.model)
        task = request.task
        grammar = task.sampling.grammar if isinstance(task, Generate) else None
        if grammar is not None:
            self.constrained_requests.labels(request.model, grammar.kind.value).inc()
        if not isinstance(task, Generate):
            self.pooled_requests.labels(request.model, task.name).inc()
        return ObservedOutputs(self, request.model, outputs, self._clock, record, lease)

    def observe_error(self, model: str, error: LoraplexError) -> None:
        """A request was refused, or failed. A model that is not served is labelled ``""``."""
        self.errors.labels(model if model in self._models else "", error.code).inc()

    def adapter_label(self, output: RequestOutput) -> str:
        """Its adapters' names; empty for the base model; from the 101st on `other`."""
        name = "+".join(adapter.name for adapter in output.adapters)
        return _bounded(name, self._adapter_labels) if name else ""

    def tenant_label(self, tenant: str) -> str:
        """Its name; from the 101st on `other`."""
        return _bounded(tenant, self._tenant_labels)

    def _counter(self, name: str, text: str, labels: tuple[str, ...]) -> Counter:
        return Counter(f"loraplex_{name}", text, labels, registry=self.registry)

    def _histogram(
        self,
        name: str,
        text: str,
        buckets: tuple[float, ...],
        labels: tuple[str, ...] = ("model",),
    ) -> Histogram:
        return Histogram(f"loraplex_{name}", text, labels, buckets=buckets, registry=self.registry)


class ObservedOutputs(AsyncIterator[RequestOutput]):
    """Passes a request's outputs on, counts each of them once, and ends its lease with them.

    A request that is left early had its whole prompt, and of its outputs what was delivered.
    """

    def __init__(
        self,
        metrics: RequestMetrics,
        model: str,
        outputs: AdmittedOutputs,
        clock: Clock,
        record: GenerationRecord,
        lease: Endable,
    ) -> None:
        self._lease = lease
        self._metrics = metrics
        self._model = model
        self._outputs = outputs
        self._clock = clock
        self._record = record
        self._admitted_ns = clock.now_ns()
        self._last_token_ns: dict[int, int] = {}
        """Time of the last token by sequence index."""
        self._finish_reason: FinishReason | None = None
        """Finish reason of the sequence that ended last."""
        self._adapter: str | None = None
        """Its label; None before the first output."""
        self._num_output_tokens = self._num_counted_tokens = 0
        self._latencies: list[float] = []
        """Seconds before each token that is not counted yet."""
        self._counted_ns = self._admitted_ns
        self._is_over = False
        self._inter_token_latency = metrics.inter_token_latency.labels(model)
        self._generation_tokens = metrics.generation_tokens
        """The counter; from the first output on that of the model and the adapter."""

    async def __anext__(self) -> RequestOutput:
        try:
            output = await anext(self._outputs)
        except Exception as error:
            if isinstance(error, LoraplexError):
                self._metrics.observe_error(self._model, error)
                self._end(FinishReason.ERROR, error)
            self._end_lease(is_error=isinstance(error, LoraplexError))
            raise
        self._count(output)
        return output

    def when_ready(self, read: Callable[[], bool]) -> None:
        """Implements ReadyOutputs."""
        self._outputs.when_ready(read)

    def take_ready(self) -> RequestOutput | None:
        """Implements ReadyOutputs."""
        output = self._outputs.take_ready()
        if output is not None:
            self._count(output)
        return output

    def cancel(self) -> None:
        """Implements Cancellable. The last output is counted when it comes."""
        self._outputs.cancel()

    async def aclose(self) -> None:
        self._end(FinishReason.ABORT)
        self._end_lease()
        await self._outputs.aclose()

    def _count(self, output: RequestOutput) -> None:
        now_ns = self._clock.now_ns()
        self._record.count(output, now_ns)
        if self._adapter is None:
            self._adapter = self._metrics.adapter_label(output)
            prompt_tokens = self._metrics.prompt_tokens.labels(self._model, self._adapter)
            prompt_tokens.inc(len(output.prompt_token_ids))
            generation_tokens = self._metrics.generation_tokens
            self._generation_tokens = generation_tokens.labels(self._model, self._adapter)
        for sequence in output.sequences:
            self._count_tokens(sequence.index, len(sequence.token_ids), now_ns)
            self._finish_reason = sequence.finish_reason or self._finish_reason
        self._num_output_tokens = max(self._num_output_tokens, output.num_output_tokens)
        if now_ns - self._counted_ns >= _OBSERVED_NS:
            self._count_all(now_ns)
        if output.finished:
            self._count_times(output, now_ns)
            self._end(self._finish_reason or FinishReason.STOP)
            self._end_lease()

    def _count_all(self, now_ns: int) -> None:
        """Count the tokens since the last call."""
        self._counted_ns = now_ns
        for seconds in self._latencies:
            self._inter_token_latency.observe(seconds)
        self._latencies.clear()
        num_new = self._num_output_tokens - self._num_counted_tokens
        if num_new:
            self._num_counted_tokens = self._num_output_tokens
            self._generation_tokens.inc(num_new)

    def _end_lease(self, *, is_error: bool = False) -> None:
        self._count_all(self._clock.now_ns())
        num_tokens = self._outputs.num_prompt_tokens + self._num_output_tokens
        self._lease.end(num_tokens, is_error=is_error)

    def _count_tokens(self, index: int, num_tokens: int, now_ns: int) -> None:
        if num_tokens == 0:
            return
        if not self._last_token_ns:
            seconds = _seconds(now_ns - self._admitted_ns)
            self._metrics.time_to_first_token.labels(self._model).observe(seconds)
            by_adapter = self._metrics.adapter_time_to_first_token
            by_adapter.labels(self._model, self._adapter).observe(seconds)
        elif index in self._last_token_ns:
            share = _seconds(now_ns - self._last_token_ns[index]) / num_tokens
            self._latencies += [share] * num_tokens
        self._last_token_ns[index] = now_ns

    def _count_times(self, output: RequestOutput, now_ns: int) -> None:
        e2e_latency = self._metrics.e2e_latency.labels(self._model)
        e2e_latency.observe(_seconds(now_ns - self._admitted_ns))
        timing = output.timing
        if timing is None:
            return
        if timing.queue_seconds is not None:
            tenant = self._metrics.tenant_label(self._record.tenant)
            by_tenant = self._metrics.tenant_queue_time.labels(self._model, tenant)
            by_tenant.observe(max(timing.queue_seconds, 0.0))
        for histogram, seconds in (
            (self._metrics.queue_time, timing.queue_seconds),
            (self._metrics.prefill_time, timing.prefill_seconds),
            (self._metrics.adapter_wait_time, timing.adapter_wait_seconds),
        ):
            if seconds is not None:
                histogram.labels(self._model).observe(max(seconds, 0.0))
        if timing.num_restarts:
            self._metrics.restarted_requests.labels(self._model).inc()

    def _end(self, reason: FinishReason, error: LoraplexError | None = None) -> None:
        self._record.end(self._clock.now_ns(), error)
        if not self._is_over:
            self._is_over = True
            self._metrics.requests.labels(self._model, self._adapter or "", reason.value).inc()


def _bounded(name: str, labels: set[str]) -> str:
    """Return the name if it is a label or may become one."""
    if name not in labels:
        if len(labels) >= MAX_LABELS:
            return OTHERS
        labels.add(name)
    return name


def _seconds(nanoseconds: int) -> float:
    return nanoseconds / 1e9
