"""Selection of Triton's metric families: the values of tritonserver's --metrics-config."""

import math
from collections.abc import Sequence

import msgspec

from loraplex.core.errors import ConfigError

_QUANTILES = "summary_quantiles"
_TRUE, _FALSE = ("true", "1"), ("false", "0")


class MetricsConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Triton's metric families to expose; all others are always exposed."""

    counter_latencies: bool = True
    """nv_inference_*_duration_us."""
    histogram_latencies: bool = False
    """nv_inference_first_response_histogram_ms."""
    summary_latencies: bool = False
    """nv_inference_*_summary_us."""
    quantiles: tuple[float, ...] = (0.5, 0.9, 0.95, 0.99, 0.999)
    """Quantiles of the summaries, each above 0 and below 1."""

    @property
    def keeps_latencies(self) -> bool:
        return self.histogram_latencies or self.summary_latencies


_SWITCHES = ("counter_latencies", "histogram_latencies", "summary_latencies")


def read_metrics_config(words: Sequence[str]) -> MetricsConfig:
    """Parse words of the form NAME=VALUE; the last one of a name counts. Raises ConfigError."""
    config = MetricsConfig()
    for word in words:
        name, equals, value = word.partition("=")
        if name in _SWITCHES and value.lower() in _TRUE + _FALSE:
            is_on = value.lower() in _TRUE
            config = msgspec.structs.replace(config, **{name: is_on})
        elif name == _QUANTILES and equals:
            config = msgspec.structs.replace(config, quantiles=_quantiles(value))
        else:
            raise ConfigError(
                f"must be NAME=true, NAME=false or {_QUANTILES}=QUANTILE:ERROR,..., with "
                f"the names {', '.join(_SWITCHES)}; got {word!r}"
            )
    return config


def _quantiles(text: str) -> tuple[float, ...]:
    """Parse QUANTILE:ERROR pairs. The errors are not needed: quantiles of a window are exact."""
    try:
        pairs = [pair.partition(":") for pair in text.split(",")]
        found = [(float(quantile), float(error or 0)) for quantile, _, error in pairs]
    except ValueError:
        found = []
    if not found or not all(0 < q < 1 and 0 <= error < math.inf for q, error in found):
        raise ConfigError(
            f"must have {_QUANTILES} as QUANTILE:ERROR with commas between them, each "
            f"quantile above 0 and below 1, such as 0.5:0.05,0.9:0.01; got {text!r}"
        )
    return tuple(quantile for quantile, _ in found)
