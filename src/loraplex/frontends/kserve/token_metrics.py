"""Tokens and times of finished requests, by the names of the TensorRT-LLM and vLLM backends.

Families nv_llm_* and vllm:*, labelled as there with the Triton model and its version. A request
adds to plain numbers; a scrape makes families of them.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType

import msgspec
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from loraplex.frontends.kserve.latencies import Histogram

LABELS = ("model", "version")
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


class _Family(msgspec.Struct, frozen=True):
    text: str
    """Its help."""
    bounds: Sequence[float] = ()
    """Upper bounds of its buckets; none: a counter."""


_TRTLLM_TEXT = "TRT LLM response metrics"
_TRTLLM: Mapping[str, _Family] = MappingProxyType(
    dict.fromkeys(("input", "output"), _Family(_TRTLLM_TEXT, (10, 50, 100, 500, 1000)))
)
_VLLM: Mapping[str, _Family] = MappingProxyType(
    {
        "prompt_tokens": _Family("Number of prefill tokens processed."),
        "generation_tokens": _Family("Number of generation tokens processed."),
        "time_to_first_token_seconds": _Family(
            "Histogram of time to first token in seconds.", _TTFT_BUCKETS
        ),
        "time_per_output_token_seconds": _Family(
            "Histogram of time per output token in seconds.", _PER_TOKEN_BUCKETS
        ),
        "e2e_request_latency_seconds": _Family(
            "Histogram of end to end request latency in seconds.", _E2E_BUCKETS
        ),
        "request_prompt_tokens": _Family("Number of prefill tokens processed.", _TOKEN_BUCKETS),
        "request_generation_tokens": _Family(
            "Number of generation tokens processed.", _TOKEN_BUCKETS
        ),
        "request_params_n": _Family("Histogram of the n request parameter.", _N_BUCKETS),
    }
)


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


class _Series:
    """The values of one model in some families, by their names."""

    def __init__(self, families: Mapping[str, _Family]) -> None:
        self.histograms = {
            name: Histogram(family.bounds) for name, family in families.items() if family.bounds
        }
        self.counters = {name: 0 for name, family in families.items() if not family.bounds}


class TokenMetrics(Collector):
    """All series, by (model, version)."""

    def __init__(self) -> None:
        self._trtllm: dict[tuple[str, str], _Series] = {}
        self._vllm: dict[tuple[str, str], _Series] = {}

    def collect(self) -> Iterator[Metric]:
        for name, family in _TRTLLM.items():
            response_type = f"total_{name}_tokens"
            rows = [((*model, response_type), series) for model, series in self._trtllm.items()]
            labels = (*LABELS, "response_metric_type")
            yield _histogram(f"nv_llm_{name}_token_len", family, labels, rows, name)
        for name, family in _VLLM.items():
            collected = _histogram if family.bounds else _counter
            yield collected(f"vllm:{name}", family, LABELS, self._vllm.items(), name)

    def expect(self, labels: TokenLabels) -> None:
        """A model of the catalog: its families are there from the start, with zeros."""
        if labels.trtllm is not None:
            self._trtllm.setdefault(labels.trtllm, _Series(_TRTLLM))
        if labels.vllm is not None:
            self._vllm.setdefault(labels.vllm, _Series(_VLLM))

    def observe(self, labels: TokenLabels, times: TokenTimes) -> None:
        """Count one finished element of a request to a model of the catalog."""
        if labels.trtllm is not None:
            lengths = _of(self._trtllm, labels.trtllm, _TRTLLM).histograms
            lengths["input"].add(times.num_prompt_tokens)
            lengths["output"].add(times.num_output_tokens)
        if labels.vllm is not None:
            _observe_vllm(_of(self._vllm, labels.vllm, _VLLM), times)


def _of(
    series: dict[tuple[str, str], _Series], labels: tuple[str, str], families: Mapping[str, _Family]
) -> _Series:
    found = series.get(labels)
    if found is None:
        found = series[labels] = _Series(families)
    return found


def _observe_vllm(series: _Series, times: TokenTimes) -> None:
    num_prompt, num_output = times.num_prompt_tokens, times.num_output_tokens
    series.counters["prompt_tokens"] += num_prompt
    series.counters["generation_tokens"] += num_output
    histograms = series.histograms
    histograms["request_prompt_tokens"].add(num_prompt)
    histograms["request_generation_tokens"].add(num_output)
    histograms["request_params_n"].add(times.num_sequences)
    if times.first_token_seconds is not None:
        histograms["time_to_first_token_seconds"].add(max(times.first_token_seconds, 0.0))
    if times.total_seconds is not None:
        histograms["e2e_request_latency_seconds"].add(max(times.total_seconds, 0.0))
    if times.seconds_per_token is not None:
        seconds, num_later = max(times.seconds_per_token, 0.0), num_output - times.num_sequences
        histograms["time_per_output_token_seconds"].add(seconds, num_later)


_Rows = Iterable[tuple[Sequence[str], _Series]]
"""Values of labels, and the series that they have."""


def _counter(
    metric: str, family: _Family, labels: Sequence[str], rows: _Rows, name: str
) -> CounterMetricFamily:
    collected = CounterMetricFamily(metric, family.text, labels=labels)
    for values, series in rows:
        collected.add_metric(values, series.counters[name])
    return collected


def _histogram(
    metric: str, family: _Family, labels: Sequence[str], rows: _Rows, name: str
) -> HistogramMetricFamily:
    collected = HistogramMetricFamily(metric, family.text, labels=labels)
    for values, series in rows:
        histogram = series.histograms[name]
        collected.add_metric(values, histogram.cumulative(), histogram.sum)
    return collected
