"""Families of Triton, nv_inference_*, and of its TensorRT-LLM backend, nv_trt_llm_*, as tables.

Those of the backend come from the engine's reports: one series per served base model, labelled with
the Triton model that takes token ids. The verbose log has the same values in one line of JSON for
each model, as the original's has.
"""

import datetime
import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from prometheus_client.core import HistogramMetricFamily, Metric

from loraplex.core.errors import NotReadyError
from loraplex.core.metrics_config import MetricsConfig
from loraplex.core.stats import EngineStats, StepRecord
from loraplex.frontends.kserve.models.catalog import Catalog
from loraplex.frontends.kserve.models.kinds import TENSORRT_LLM, BackendDialect
from loraplex.frontends.kserve.models.triton_model import TritonModel
from loraplex.frontends.kserve.statistics import (
    FIRST_RESPONSE,
    LABELS,
    ModelCounts,
    Statistics,
    TokenLabels,
)
from loraplex.frontends.metric_families import (
    ExactCounter,
    Family,
    FunctionCollector,
    Source,
    Subjects,
    collected,
)
from loraplex.serving.backend import Backend
from loraplex.serving.model_memory import ModelMemory

logger = logging.getLogger(__name__)

# ---------------------------------------------------------------- Triton's, of a ModelCounts


class _Summary(Metric):
    """Count and sum are of all time, quantiles of the window."""

    def __init__(self, name: str, text: str, labels: Sequence[str]) -> None:
        super().__init__(name, text, "summary")
        self._labels = labels

    def add_metric(
        self, labels: Sequence[str], quantiles: Mapping[float, float], count: int, total: float
    ) -> None:
        named = dict(zip(self._labels, labels, strict=True))
        for quantile, value in quantiles.items():
            self.add_sample(self.name, {**named, "quantile": f"{quantile:g}"}, value)
        self.add_sample(f"{self.name}_count", named, count)
        self.add_sample(f"{self.name}_sum", named, total)


_COUNTS: Final = (
    Family(
        "nv_inference_request_success",
        "Number of successful inference requests, all batch sizes",
        lambda counts: counts.times["success"].count,
        type=ExactCounter,
    ),
    Family(
        "nv_inference_count",
        "Number of inferences performed (does not include cached requests)",
        "num_inferences",
        type=ExactCounter,
    ),
    Family(
        "nv_inference_exec_count",
        "Number of model executions performed (does not include cached requests)",
        lambda counts: counts.times["success"].count,
        type=ExactCounter,
    ),
    Family(
        "nv_inference_request_failure",
        "Number of failed inference requests, all batch sizes",
        lambda counts: {reason.value: number for reason, number in counts.failures.items()},
        ("reason",),
        ExactCounter,
    ),
)
_DURATIONS: Final = {
    "request": ("success", "inference request duration in microseconds (includes cached requests)"),
    "queue": ("queue", "inference queuing duration in microseconds (includes cached requests)"),
    **{
        f"compute_{phase}": (
            f"compute_{phase}",
            f"{text} duration in microseconds (does not include cached requests)",
        )
        for phase, text in (
            ("input", "compute input"),
            ("infer", "compute inference"),
            ("output", "inference compute output"),
        )
    },
}
"""Span of the statistics, and help, by the name in the families of times."""


def _of_times(name: str, span: str, text: str, config: MetricsConfig) -> Iterator[Family]:
    if config.counter_latencies:
        yield Family(
            f"nv_inference_{name}_duration_us",
            f"Cumulative {text}",
            lambda counts: counts.times[span].ns // 1000,
            type=ExactCounter,
        )
    if config.summary_latencies:
        quantiles = config.quantiles

        def summary(counts: ModelCounts) -> tuple[Mapping[float, float], int, float]:
            values = counts.windows[span].quantiles(quantiles)
            total = counts.times[span]
            return dict(zip(quantiles, values, strict=True)), total.count, total.ns // 1000

        yield Family(
            f"nv_inference_{name}_summary_us", f"Summary of {text}", summary, type=_Summary
        )


def _triton_families(config: MetricsConfig) -> Iterator[Family]:
    """Yield the families that are configured."""
    yield from _COUNTS
    for name, (span, text) in _DURATIONS.items():
        yield from _of_times(name, span, text, config)
    if config.histogram_latencies:
        yield Family(
            FIRST_RESPONSE,
            "Duration from request to first response in milliseconds",
            lambda counts: (counts.first_responses.cumulative(), counts.first_responses.sum),
            type=HistogramMetricFamily,
        )
    yield Family(
        "nv_inference_pending_request_count",
        "Instantaneous number of pending requests awaiting execution per-model.",
        "num_pending",
    )


def inference_collector(
    catalog: Catalog, statistics: Statistics, config: MetricsConfig
) -> FunctionCollector:
    """Return a collector of every loaded model, from its statistics."""
    families = tuple(_triton_families(config))

    def collect() -> Iterator[Metric]:
        models = [((m.name, m.version), statistics.of(m.name)) for m in catalog.models()]
        return collected(families, models, LABELS)

    return FunctionCollector(collect)


# ---------------------------------------------------------------- TensorRT-LLM's, of an _Engine


class _Engine(NamedTuple):
    """What is known of the engine of a model that takes token ids."""

    model: TritonModel
    stats: EngineStats
    last: StepRecord
    """The last step; zeros without one."""
    memory: ModelMemory | None
    unix_us: int


_NO_STEP: Final = StepRecord(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)
_NO_MEMORY: Final = {"cpu": 0, "gpu": 0, "pinned": 0}
_Rows = Mapping[str, tuple[str, Source]]
"""Name in the log, and source, by the value of the family's label."""
_ROWS: Final[Mapping[tuple[str, str, str], _Rows]] = {
    ("request_metrics", "TRT LLM request metrics", "request_type"): {
        "active": (
            "Active Request Count",
            lambda engine: engine.stats.num_running + engine.stats.num_waiting,
        ),
        "max": ("Max Request Count", "model.max_batch_size"),
        "scheduled": ("Scheduled Requests", "last.num_rows"),
        "context": ("Context Requests", "last.num_prefill_rows"),
        "waiting": ("Waiting Requests", "stats.num_waiting"),
    },
    ("runtime_memory_metrics", "TRT LLM runtime memory metrics", "memory_type"): {
        "cpu": ("Runtime CPU Memory Usage", lambda engine: _by_type(engine.memory)["cpu"]),
        "gpu": ("Runtime GPU Memory Usage", lambda engine: _by_type(engine.memory)["gpu"]),
        "pinned": ("Runtime Pinned Memory Usage", lambda engine: _by_type(engine.memory)["pinned"]),
    },
    ("kv_cache_block_metrics", "TRT LLM KV cache block metrics", "kv_cache_block_type"): {
        "max": (
            "Max KV cache blocks",
            lambda engine: sum(
                (engine.stats.blocks_held, engine.stats.blocks_cached, engine.stats.blocks_free)
            ),
        ),
        "free": (
            "Free KV cache blocks",
            lambda engine: engine.stats.blocks_cached + engine.stats.blocks_free,
        ),
        "used": ("Used KV cache blocks", "stats.blocks_held"),
        "tokens_per": ("Tokens per KV cache block", "model.card.kv_block_size"),
        "reused": (
            "Reused KV cache blocks",
            lambda engine: engine.stats.cached_tokens // engine.model.card.kv_block_size,
        ),
        "fraction": ("Fraction used KV cache blocks", "stats.kv_usage"),
    },
    (
        "inflight_batcher_metrics",
        "TRT LLM inflight_batcher-specific metrics",
        "inflight_batcher_specific_metric",
    ): {
        "total_context_tokens": ("Total Context Tokens", "last.num_prefill_tokens"),
        "generation_requests": (
            "Generation Requests",
            lambda engine: engine.last.num_rows - engine.last.num_prefill_rows,
        ),
        "micro_batch_id": ("MicroBatch ID", lambda _: 0),  # there is one batch
        "paused_requests": ("Paused Requests", "stats.preemptions"),
    },
    ("v1_metrics", "TRT LLM v1-specific metrics", "v1_specific_metric"): {
        "total_context_tokens": ("Total Context Tokens", "last.num_prefill_tokens"),
        "total_generation_tokens": (
            "Total Generation Tokens",
            lambda engine: engine.last.num_tokens - engine.last.num_prefill_tokens,
        ),
        "empty_generation_slots": (
            "Empty Generation Slots",
            lambda engine: max(
                engine.model.max_batch_size - engine.last.num_rows + engine.last.num_prefill_rows, 0
            ),
        ),
    },
    ("general_metrics", "General TRT LLM metrics", "general_type"): {
        "timestamp": ("Timestamp", "unix_us"),
        "iteration_counter": ("Iteration Counter", "stats.steps"),
    },
}
"""Families nv_trt_llm_* by (name, help, label). Where batches are static (V1), their family is
there, else that of the in-flight batcher."""
_NOT_OF: Final = {"inflight_batcher_metrics": True, "v1_metrics": False}
"""Kind of batches, whether static, that a family is not there for."""
_DISAGGREGATED: Final = Family(
    "nv_trt_llm_disaggregated_serving_metrics",
    "TRT LLM disaggregated serving metrics",
    # Nothing is served that way: zeros, as the original has then.
    lambda _: {"kv_cache_transfer_ms": 0, "request_count": 0},
    ("disaggregated_serving_type",),
    ExactCounter,
)
_LOGGED_ALWAYS: Final = {"KV cache transfer time": 0, "Request count": 0}
_MICROSECONDS: Final = 1_000_000
_LOGGED_TIME: Final = "%m-%d-%Y %H:%M:%S.%f"


def tensorrt_llm_collector(
    catalog: Catalog, backend: Backend, unix_seconds: Callable[[], float] = time.time
) -> FunctionCollector:
    """Return a collector of the models that take token ids."""

    def collect() -> Iterator[Metric]:
        unix_us = int(unix_seconds() * _MICROSECONDS)
        models = [model for model in catalog.models() if model.kind.name == TENSORRT_LLM.name]
        engines: Subjects = [((m.name, m.version), _engine(backend, m, unix_us)) for m in models]
        logged: dict[str, dict[str, Any]] = {model.name: dict(_LOGGED_ALWAYS) for model in models}
        for (name, text, label), rows in _ROWS.items():
            sources = {value_of: source for value_of, (_, source) in rows.items()}
            those = [
                each for each in engines if _NOT_OF.get(name) is not each[1].model.options.is_static
            ]
            (family,) = collected(
                [Family(f"nv_trt_llm_{name}", text, sources, (label,))], those, LABELS
            )
            for sample in family.samples:
                logged[sample.labels["model"]][rows[sample.labels[label]][0]] = sample.value
            yield family
        yield from collected([_DISAGGREGATED], engines, LABELS)
        for lines in logged.values():
            _log(lines)

    return FunctionCollector(collect)


def _engine(backend: Backend, model: TritonModel, unix_us: int) -> _Engine:
    served = backend.model(model.card.name)
    steps = served.steps(1)
    try:
        memory = served.memory()
    except NotReadyError:
        memory = None
    return _Engine(model, served.stats, steps[-1] if steps else _NO_STEP, memory, unix_us)


def _by_type(memory: ModelMemory | None) -> Mapping[str, int]:
    """Bytes of the engine's process, and of its device if it has one.

    Without a device all memory is the host's; adapters are not page-locked.
    """
    if memory is None:
        return _NO_MEMORY
    at_work = (
        *(memory.weights_bytes, memory.workspace_bytes, memory.graph_bytes),
        *(memory.kv.num_bytes, memory.device.num_bytes, memory.device.table_bytes),
    )
    if memory.accelerator is None:
        return {**_NO_MEMORY, "cpu": sum(at_work) + memory.host.num_bytes}
    return {**_NO_MEMORY, "cpu": memory.host.num_bytes, "gpu": sum(at_work)}


def _log(values: Mapping[str, Any]) -> None:
    """Write values as the original writes them, whose tests compare its log with its metrics."""
    if logger.isEnabledFor(logging.DEBUG):
        time_of = datetime.datetime.fromtimestamp(values["Timestamp"] / _MICROSECONDS, datetime.UTC)
        logger.debug("%s", json.dumps({**values, "Timestamp": time_of.strftime(_LOGGED_TIME)}))


def token_labels(catalog: Catalog, model: TritonModel) -> TokenLabels:
    """What a request to a model counts for.

    A request to an ensemble or to BLS is one to its generating model, as in the original. Of
    vLLM's models those count that enable it; without a model repository, those that are named as
    their base model.
    """
    core = catalog.token_model(model)
    labels = None
    if core is not None and core.kind.dialect is model.kind.dialect:
        labels = (core.name, core.version)
    if model.kind.dialect is BackendDialect.VLLM:
        return TokenLabels(vllm=labels if model.options.reports_metrics else None)
    is_base = model.name == model.card.name
    return TokenLabels(trtllm=labels, vllm=(model.name, model.version) if is_base else None)
