"""Tokens and times of answered requests, by the names of the TensorRT-LLM and vLLM backends.

Families nv_llm_* and vllm:*, labelled as there with the Triton model and its version.
"""

import dataclasses
from collections.abc import Iterable, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

_INPUT, _OUTPUT = "total_input_tokens", "total_output_tokens"
_LENGTH_BUCKETS = (10, 50, 100, 500, 1000)
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
_N_BUCKETS = (1, 2, 5, 10, 20)


@dataclasses.dataclass(frozen=True, slots=True)
class TokenTimes:
    """One element of a batch that was answered."""

    num_prompt_tokens: int
    num_output_tokens: int
    """Of all its sequences."""
    num_sequences: int
    first_token_seconds: float | None
    """From its arrival; None where the engine did not tell."""
    seconds_per_token: float | None
    """After the first token."""
    total_seconds: float | None


@dataclasses.dataclass(frozen=True, slots=True)
class TokenLabels:
    """(model, version) that a request counts for; None: it has no such families."""

    trtllm: tuple[str, str] | None = None
    vllm: tuple[str, str] | None = None


class TokenMetrics(Collector):
    """In a registry of their own."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._input_length = self._length("input")
        self._output_length = self._length("output")
        self._prompt_tokens = self._counter("prompt_tokens", "Number of prefill tokens processed.")
        self._generation_tokens = self._counter(
            "generation_tokens", "Number of generation tokens processed."
        )
        self._first_token = self._histogram(
            "time_to_first_token_seconds",
            "Histogram of time to first token in seconds.",
            _TTFT_BUCKETS,
        )
        self._per_token = self._histogram(
            "time_per_output_token_seconds",
            "Histogram of time per output token in seconds.",
            _PER_TOKEN_BUCKETS,
        )
        self._e2e = self._histogram(
            "e2e_request_latency_seconds",
            "Histogram of end to end request latency in seconds.",
            _E2E_BUCKETS,
        )
        self._request_prompt = self._histogram(
            "request_prompt_tokens", "Number of prefill tokens processed.", _TOKEN_BUCKETS
        )
        self._request_generation = self._histogram(
            "request_generation_tokens", "Number of generation tokens processed.", _TOKEN_BUCKETS
        )
        self._n = self._histogram(
            "request_params_n", "Histogram of the n request parameter.", _N_BUCKETS
        )

    def collect(self) -> Iterable[Metric]:
        return self._registry.collect()

    def expect(self, labels: TokenLabels) -> None:
        """A model of the catalog: its families are there from the start, with zeros."""
        if labels.trtllm is not None:
            self._input_length.labels(*labels.trtllm, _INPUT)
            self._output_length.labels(*labels.trtllm, _OUTPUT)
        if labels.vllm is not None:
            for family in (self._prompt_tokens, self._generation_tokens, self._first_token):
                family.labels(*labels.vllm)
            for family in (self._per_token, self._e2e, self._request_prompt):
                family.labels(*labels.vllm)
            for family in (self._request_generation, self._n):
                family.labels(*labels.vllm)

    def observe(self, labels: TokenLabels, times: TokenTimes) -> None:
        """One answered element of a request to a model of the catalog."""
        num_prompt, num_output = times.num_prompt_tokens, times.num_output_tokens
        if labels.trtllm is not None:
            self._input_length.labels(*labels.trtllm, _INPUT).observe(num_prompt)
            self._output_length.labels(*labels.trtllm, _OUTPUT).observe(num_output)
        if labels.vllm is not None:
            self._observe_vllm(labels.vllm, times)

    def _observe_vllm(self, labels: tuple[str, str], times: TokenTimes) -> None:
        num_prompt, num_output = times.num_prompt_tokens, times.num_output_tokens
        self._prompt_tokens.labels(*labels).inc(num_prompt)
        self._generation_tokens.labels(*labels).inc(num_output)
        self._request_prompt.labels(*labels).observe(num_prompt)
        self._request_generation.labels(*labels).observe(num_output)
        self._n.labels(*labels).observe(times.num_sequences)
        for histogram, seconds in (
            (self._first_token, times.first_token_seconds),
            (self._e2e, times.total_seconds),
        ):
            if seconds is not None:
                histogram.labels(*labels).observe(max(seconds, 0.0))
        if times.seconds_per_token is not None:
            per_token = self._per_token.labels(*labels)
            for _ in range(num_output - times.num_sequences):
                per_token.observe(max(times.seconds_per_token, 0.0))

    def _length(self, side: str) -> Histogram:
        return Histogram(
            f"nv_llm_{side}_token_len",
            "TRT LLM response metrics",
            ("model", "version", "response_metric_type"),
            buckets=_LENGTH_BUCKETS,
            registry=self._registry,
        )

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(f"vllm:{name}", text, ("model", "version"), registry=self._registry)

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(
            f"vllm:{name}", text, ("model", "version"), buckets=buckets, registry=self._registry
        )
