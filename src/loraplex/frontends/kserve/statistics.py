"""Counts of inference requests per Triton model, as the statistics extension shows them.

Queue and compute times are not told apart here: a request's whole time is its compute_infer.
"""

import dataclasses
import time
from typing import Any


@dataclasses.dataclass(slots=True)
class ModelCounts:
    """Since the server started; durations in nanoseconds."""

    num_success: int = 0
    success_ns: int = 0
    num_fail: int = 0
    fail_ns: int = 0
    num_inferences: int = 0
    """Elements of batches that were answered."""
    last_inference_ms: int = 0
    """Wall time, Unix milliseconds."""


class Statistics:
    def __init__(self) -> None:
        self._counts: dict[str, ModelCounts] = {}

    def of(self, model: str) -> ModelCounts:
        return self._counts.setdefault(model, ModelCounts())

    def record_success(self, model: str, batch_size: int, duration_ns: int) -> None:
        counts = self.of(model)
        counts.num_success += 1
        counts.success_ns += duration_ns
        counts.num_inferences += batch_size
        counts.last_inference_ms = time.time_ns() // 1_000_000

    def record_failure(self, model: str, duration_ns: int) -> None:
        counts = self.of(model)
        counts.num_fail += 1
        counts.fail_ns += duration_ns

    def report(self, model: str, version: str) -> dict[str, Any]:
        """One entry of `model_stats`, in the words of Triton's ModelStatistics."""
        counts = self.of(model)
        success = {"count": counts.num_success, "ns": counts.success_ns}
        none = {"count": 0, "ns": 0}
        return {
            "name": model,
            "version": version,
            "last_inference": counts.last_inference_ms,
            "inference_count": counts.num_inferences,
            "execution_count": counts.num_success,
            "inference_stats": {
                "success": success,
                "fail": {"count": counts.num_fail, "ns": counts.fail_ns},
                "queue": none,
                "compute_input": none,
                "compute_infer": success,
                "compute_output": none,
                "cache_hit": none,
                "cache_miss": none,
            },
            "batch_stats": [],
        }
