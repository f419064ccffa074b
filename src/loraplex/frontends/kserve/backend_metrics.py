"""The families of the TensorRT-LLM backend, nv_trt_llm_*, from the engine's reports.

One series per served base model, labelled with the Triton model that takes token ids. The verbose
log has the same values in one line of JSON for each model, as the original's has.
"""

import datetime
import json
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Final

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from loraplex.core.errors import NotReadyError
from loraplex.core.stats import EngineStats
from loraplex.frontends.kserve.models.catalog import Catalog
from loraplex.frontends.kserve.models.kinds import Dialect
from loraplex.frontends.kserve.models.tensorrt_llm import TENSORRT_LLM
from loraplex.frontends.kserve.models.triton_model import TritonModel
from loraplex.frontends.kserve.token_metrics import TokenLabels
from loraplex.frontends.prometheus_text import ExactCounter
from loraplex.serving.backend import Backend
from loraplex.serving.model_memory import ModelMemory

logger = logging.getLogger(__name__)

_Values = dict[str, float]

_LOGGED: Final[Mapping[str, Mapping[str, str]]] = MappingProxyType(
    {
        "request_metrics": {
            "active": "Active Request Count",
            "max": "Max Request Count",
            "scheduled": "Scheduled Requests",
            "context": "Context Requests",
            "waiting": "Waiting Requests",
        },
        "runtime_memory_metrics": {
            "cpu": "Runtime CPU Memory Usage",
            "gpu": "Runtime GPU Memory Usage",
            "pinned": "Runtime Pinned Memory Usage",
        },
        "kv_cache_block_metrics": {
            "max": "Max KV cache blocks",
            "free": "Free KV cache blocks",
            "used": "Used KV cache blocks",
            "tokens_per": "Tokens per KV cache block",
            "reused": "Reused KV cache blocks",
            "fraction": "Fraction used KV cache blocks",
        },
        "inflight_batcher_metrics": {
            "total_context_tokens": "Total Context Tokens",
            "generation_requests": "Generation Requests",
            "micro_batch_id": "MicroBatch ID",
            "paused_requests": "Paused Requests",
        },
        "v1_metrics": {
            "total_context_tokens": "Total Context Tokens",
            "total_generation_tokens": "Total Generation Tokens",
            "empty_generation_slots": "Empty Generation Slots",
        },
        "general_metrics": {"timestamp": "Timestamp", "iteration_counter": "Iteration Counter"},
    }
)
"""The original's names in the log, by families and their labels."""
_LOGGED_ALWAYS: Final = MappingProxyType({"KV cache transfer time": 0, "Request count": 0})
_MICROSECONDS: Final = 1_000_000
_LOGGED_TIME: Final = "%m-%d-%Y %H:%M:%S.%f"


class TensorRtLlmCollector(Collector):
    def __init__(
        self, catalog: Catalog, backend: Backend, unix_seconds: Callable[[], float] = time.time
    ) -> None:
        self._catalog = catalog
        self._backend = backend
        self._unix_seconds = unix_seconds

    def describe(self) -> Iterable[Metric]:
        """Return nothing: registering must not call a backend that has not started."""
        return ()

    def collect(self) -> Iterator[Metric]:
        models = [model for model in self._catalog.models() if model.kind.name == TENSORRT_LLM.name]
        inflight = [model for model in models if not model.options.is_static]
        logged: dict[str, dict[str, float | str]] = {
            model.name: dict(_LOGGED_ALWAYS) for model in models
        }
        for name, text, label, values, whose in (
            ("request_metrics", "TRT LLM request metrics", "request_type", self._requests, models),
            (
                "runtime_memory_metrics",
                "TRT LLM runtime memory metrics",
                "memory_type",
                self._memory,
                models,
            ),
            (
                "kv_cache_block_metrics",
                "TRT LLM KV cache block metrics",
                "kv_cache_block_type",
                self._blocks,
                models,
            ),
            (
                "inflight_batcher_metrics",
                "TRT LLM inflight_batcher-specific metrics",
                "inflight_batcher_specific_metric",
                self._batch,
                inflight,
            ),
            (
                "v1_metrics",
                "TRT LLM v1-specific metrics",
                "v1_specific_metric",
                self._static_batch,
                [model for model in models if model.options.is_static],
            ),
            ("general_metrics", "General TRT LLM metrics", "general_type", self._general, models),
        ):
            gauge = GaugeMetricFamily(
                f"nv_trt_llm_{name}", text, labels=["model", label, "version"]
            )
            for model in whose:
                for value_of, value in values(model).items():
                    gauge.add_metric([model.name, value_of, model.version], value)
                    logged[model.name][_LOGGED[name][value_of]] = value
            yield gauge
        yield _disaggregated(models)
        for lines in logged.values():
            _log(lines)

    def _stats(self, model: TritonModel) -> EngineStats:
        return self._backend.model(model.card.name).stats

    def _requests(self, model: TritonModel) -> _Values:
        """Sequences; `max` is how many the last steps could have had, `context` in their prompt."""
        stats = self._stats(model)
        step = self._backend.model(model.card.name).steps(1)
        return {
            "active": stats.num_running + stats.num_waiting,
            "max": model.max_batch_size,
            "scheduled": step[-1].num_rows if step else 0,
            "context": step[-1].num_prefill_rows if step else 0,
            "waiting": stats.num_waiting,
        }

    def _memory(self, model: TritonModel) -> _Values:
        """Bytes of the engine's process, and of its device if it has one."""
        try:
            memory = self._backend.model(model.card.name).memory()
        except NotReadyError:
            return {"cpu": 0, "gpu": 0, "pinned": 0}
        return _by_type(memory)

    def _blocks(self, model: TritonModel) -> _Values:
        stats = self._stats(model)
        total = stats.blocks_held + stats.blocks_cached + stats.blocks_free
        block_size = model.card.kv_block_size
        return {
            "max": total,
            "free": stats.blocks_cached + stats.blocks_free,
            "used": stats.blocks_held,
            "tokens_per": block_size,
            "reused": stats.cached_tokens // block_size,
            "fraction": stats.kv_usage,
        }

    def _batch(self, model: TritonModel) -> _Values:
        """Values of the last step; micro_batch_id is 0: there is one batch."""
        stats = self._stats(model)
        step = self._backend.model(model.card.name).steps(1)
        last = step[-1] if step else None
        return {
            "total_context_tokens": last.num_prefill_tokens if last else 0,
            "generation_requests": last.num_rows - last.num_prefill_rows if last else 0,
            "micro_batch_id": 0,
            "paused_requests": stats.preemptions,
        }

    def _static_batch(self, model: TritonModel) -> _Values:
        """Values of the last step where batches are static (V1), instead of _batch."""
        step = self._backend.model(model.card.name).steps(1)
        last = step[-1] if step else None
        running = last.num_rows - last.num_prefill_rows if last else 0
        return {
            "total_context_tokens": last.num_prefill_tokens if last else 0,
            "total_generation_tokens": last.num_tokens - last.num_prefill_tokens if last else 0,
            "empty_generation_slots": max(model.max_batch_size - running, 0),
        }

    def _general(self, model: TritonModel) -> _Values:
        return {
            "timestamp": int(self._unix_seconds() * _MICROSECONDS),
            "iteration_counter": self._stats(model).steps,
        }


def _by_type(memory: ModelMemory) -> _Values:
    """Memory by type. Without a device all memory is the host's; adapters are not page-locked."""
    at_work = (
        *(memory.weights_bytes, memory.workspace_bytes, memory.graph_bytes),
        *(memory.kv.num_bytes, memory.device.num_bytes, memory.device.table_bytes),
    )
    if memory.accelerator is None:
        return {"cpu": sum(at_work) + memory.host.num_bytes, "gpu": 0, "pinned": 0}
    return {"cpu": memory.host.num_bytes, "gpu": sum(at_work), "pinned": 0}


def _log(values: dict[str, float | str]) -> None:
    """Write values as the original writes them, whose tests compare its log with its metrics."""
    if logger.isEnabledFor(logging.DEBUG):
        seconds = float(values["Timestamp"]) / _MICROSECONDS
        time_of = datetime.datetime.fromtimestamp(seconds, datetime.UTC)
        logger.debug("%s", json.dumps(values | {"Timestamp": time_of.strftime(_LOGGED_TIME)}))


def _disaggregated(models: Iterable[TritonModel]) -> ExactCounter:
    """Nothing is served that way: zeros, as the original has then."""
    counter = ExactCounter(
        "nv_trt_llm_disaggregated_serving_metrics", "TRT LLM disaggregated serving metrics"
    )
    for model in models:
        for value_of in ("kv_cache_transfer_ms", "request_count"):
            labels = {
                "model": model.name,
                "disaggregated_serving_type": value_of,
                "version": model.version,
            }
            counter.add(labels, 0)
    return counter


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
    if model.kind.dialect is Dialect.VLLM:
        return TokenLabels(vllm=labels if model.options.reports_metrics else None)
    is_base = model.name == model.card.name
    return TokenLabels(trtllm=labels, vllm=(model.name, model.version) if is_base else None)
