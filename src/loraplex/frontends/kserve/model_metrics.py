"""`model_metrics` of a model's configuration: the buckets of its histograms.

Fields: ModelMetrics of model_config.proto. Histograms of other servers are ignored.
"""

import itertools
from collections.abc import Mapping
from typing import Any, Final

from loraplex.core.errors import ConfigError

FIRST_RESPONSE: Final = "nv_inference_first_response_histogram_ms"
"""The family of the histogram that models may have buckets of their own for."""


def first_response_buckets(
    model: str, config: Mapping[str, Any] | None
) -> tuple[float, ...] | None:
    """Upper bounds in milliseconds; None: the configuration has none.

    Raises ConfigError for bounds that do not grow.
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
