"""Settings of the trace extension. They are kept and returned, and trace nothing. A server that
sends traces to a collector (otlp_endpoint) returns that, and it cannot be changed here.

A model without a value of its own has the server's. Names, defaults and the first words of
errors are Triton's.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from loraplex.core.errors import InvalidRequestError, UnsupportedFeatureError

TraceValue = str | list[str]

DEFAULTS: Mapping[str, TraceValue] = MappingProxyType(
    {
        "trace_level": ["OFF"],
        "trace_rate": "1000",
        "trace_count": "-1",
        "log_frequency": "0",
        "trace_file": "",
        "trace_mode": "triton",
    }
)
SENT_TO_A_COLLECTOR: Mapping[str, TraceValue] = MappingProxyType(
    {
        **DEFAULTS,
        "trace_level": ["TIMESTAMPS"],
        "trace_rate": "1",
        "trace_mode": "opentelemetry",
    }
)
"""Every request, unless the caller's trace or OTEL_TRACES_SAMPLER decides otherwise."""
LEVELS = ("OFF", "TIMESTAMPS", "TENSORS")
_LOWEST = {"trace_rate": 0, "trace_count": -1, "log_frequency": 0}
FIXED = {"trace_file": "trace file location", "trace_mode": "trace mode"}


class TraceSettings:
    def __init__(self, *, sends_traces: bool = False) -> None:
        self._sends_traces = sends_traces
        self._server: dict[str, TraceValue] = dict(
            SENT_TO_A_COLLECTOR if sends_traces else DEFAULTS
        )
        self._models: dict[str, dict[str, TraceValue]] = {}

    def of(self, model: str = "") -> dict[str, TraceValue]:
        """Settings of a model, or of the server."""
        return {**self._server, **self._models.get(model, {})}

    def update(
        self, changes: Mapping[str, Sequence[str] | None], model: str = ""
    ) -> dict[str, TraceValue]:
        """Change what is named; None gives a setting its default, or the server's, back.

        Names that are not known change nothing, as in Triton. Raises InvalidRequestError and
        UnsupportedFeatureError, and then nothing has changed.
        """
        if self._sends_traces and (known := sorted(changes.keys() & DEFAULTS.keys())):
            raise UnsupportedFeatureError(
                f"'{known[0]}' can not be changed: the server's operator has traces sent to a "
                "collector (otlp_endpoint, OTEL_TRACES_SAMPLER)",
                param=known[0],
            )
        checked = {
            name: None if values is None else _checked(name, values)
            for name, values in changes.items()
            if name in DEFAULTS
        }
        own = self._models.setdefault(model, {}) if model else self._server
        for name, value in checked.items():
            if value is not None:
                own[name] = value
            elif model:
                own.pop(name, None)
            else:
                own[name] = DEFAULTS[name]
        return self.of(model)


def _checked(name: str, values: Sequence[str]) -> TraceValue:
    if name in FIXED:
        raise UnsupportedFeatureError(
            f"{FIXED[name]} can not be updated through network protocol", param=name
        )
    if name == "trace_level":
        if not values or any(value not in LEVELS for value in values):
            raise InvalidRequestError(
                f"Unable to parse '{name}', got: {', '.join(values)[:80]}; the levels are "
                f"{', '.join(LEVELS)}",
                param=name,
            )
        return list(values)
    if len(values) != 1:
        raise InvalidRequestError(f"expect only 1 value for '{name}'", param=name)
    return _number(name, values[0])


def _number(name: str, text: str) -> str:
    digits = text.removeprefix("-")
    is_number = digits.isascii() and digits.isdigit() and len(digits) < 11
    if not is_number or not _LOWEST[name] <= int(text) < 2**31:
        raise InvalidRequestError(
            f"Unable to parse '{name}', got: {text[:40]}; it must be an integer of at least "
            f"{_LOWEST[name]}",
            param=name,
        )
    return str(int(text))
