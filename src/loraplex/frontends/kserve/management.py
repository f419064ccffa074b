"""Management of the server: settings of tracing and logging, and which models are loaded.

Used by HTTP and gRPC. All but the index, which shows a tenant its models, is for operators. Names,
defaults and the first words of errors are Triton's.
"""

import logging
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from loraplex.core.errors import (
    InvalidRequestError,
    ModelNotFoundError,
    UnsupportedFeatureError,
)
from loraplex.core.principal import Principal
from loraplex.frontends.kserve.models.catalog import Catalog
from loraplex.frontends.kserve.models.model_control import unloads_dependents

TraceValue = str | list[str]

TRACE_DEFAULTS: Mapping[str, TraceValue] = MappingProxyType(
    {
        "trace_level": ["OFF"],
        "trace_rate": "1000",
        "trace_count": "-1",
        "log_frequency": "0",
        "trace_file": "",
        "trace_mode": "triton",
    }
)
_SENT_TO_A_COLLECTOR: Mapping[str, TraceValue] = MappingProxyType(
    {
        **TRACE_DEFAULTS,
        "trace_level": ["TIMESTAMPS"],
        "trace_rate": "1",
        "trace_mode": "opentelemetry",
    }
)
"""Every request, unless the caller's trace or OTEL_TRACES_SAMPLER decides otherwise."""
_LEVELS = ("OFF", "TIMESTAMPS", "TENSORS")
_LOWEST = {"trace_rate": 0, "trace_count": -1, "log_frequency": 0}
FIXED_TRACE_SETTINGS = {"trace_file": "trace file location", "trace_mode": "trace mode"}


class KeptTraceSettings:
    """Settings of the trace extension. They are kept and returned, and trace nothing.

    A server that sends traces to a collector (otlp_endpoint) returns that, and it cannot be changed
    here. A model without a value of its own has the server's.
    """

    def __init__(self, *, sends_traces: bool = False) -> None:
        self._sends_traces = sends_traces
        self._server: dict[str, TraceValue] = dict(
            _SENT_TO_A_COLLECTOR if sends_traces else TRACE_DEFAULTS
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
        if self._sends_traces and (known := sorted(changes.keys() & TRACE_DEFAULTS.keys())):
            raise UnsupportedFeatureError(
                f"'{known[0]}' can not be changed: the server's operator has traces sent to a "
                "collector (otlp_endpoint, OTEL_TRACES_SAMPLER)",
                param=known[0],
            )
        checked = {
            name: None if values is None else _checked_trace(name, values)
            for name, values in changes.items()
            if name in TRACE_DEFAULTS
        }
        own = self._models.setdefault(model, {}) if model else self._server
        for name, value in checked.items():
            if value is not None:
                own[name] = value
            elif model:
                own.pop(name, None)
            else:
                own[name] = TRACE_DEFAULTS[name]
        return self.of(model)


def _checked_trace(name: str, values: Sequence[str]) -> TraceValue:
    if name in FIXED_TRACE_SETTINGS:
        raise UnsupportedFeatureError(
            f"{FIXED_TRACE_SETTINGS[name]} can not be updated through network protocol", param=name
        )
    if name == "trace_level":
        if not values or any(value not in _LEVELS for value in values):
            raise InvalidRequestError(
                f"Unable to parse '{name}', got: {', '.join(values)[:80]}; the levels are "
                f"{', '.join(_LEVELS)}",
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


LogValue = bool | int | str

_LOGGER = "loraplex"
_FORMATS = ("default", "ISO8601")
_MAX_VERBOSE_LEVEL = 2**32 - 1
LOG_DEFAULTS: Mapping[str, LogValue] = MappingProxyType(
    {
        "log_file": "",
        "log_info": True,
        "log_warning": True,
        "log_error": True,
        "log_verbose_level": 0,
        "log_format": "default",
    }
)
OTHER_LOG_NAMES = {"log_warnings": "log_warning", "log_errors": "log_error"}
_LEVEL_SWITCHES = {
    "log_verbose_level": logging.DEBUG,
    "log_info": logging.INFO,
    "log_warning": logging.WARNING,
    "log_error": logging.ERROR,
}
"""Level that a setting turns on, the most detailed first: a verbose level above 0 shows all."""


class LiveLogSettings:
    """Log settings of the whole process. The initial level stays until a change.

    Where the log goes and how its lines look is fixed while the server runs, but the format is kept
    and returned.
    """

    def __init__(self, logger: logging.Logger | None = None) -> None:
        self._logger = logger or logging.getLogger(_LOGGER)
        effective = self._logger.getEffectiveLevel()
        self._settings = dict(LOG_DEFAULTS)
        for name, level in _LEVEL_SWITCHES.items():
            self._settings[name] = type(LOG_DEFAULTS[name])(effective <= level)

    def report(self) -> dict[str, LogValue]:
        return dict(self._settings)

    def update(self, changes: Mapping[str, object]) -> dict[str, LogValue]:
        """Change what is named; names that are not known change nothing, as in Triton.

        Raises InvalidRequestError and UnsupportedFeatureError, and then nothing has changed.
        """
        named = {OTHER_LOG_NAMES.get(name, name): value for name, value in changes.items()}
        checked = {name: _checked_log(name, v) for name, v in named.items() if name in LOG_DEFAULTS}
        self._settings.update(checked)
        if checked:
            on = (level for name, level in _LEVEL_SWITCHES.items() if self._settings[name])
            self._logger.setLevel(next(on, logging.CRITICAL))
        return self.report()


def _checked_log(name: str, value: object) -> LogValue:
    shown = repr(value)[:40]
    if name == "log_file":
        raise UnsupportedFeatureError(
            "log file location can not be updated through network protocol", param=name
        )
    if name == "log_verbose_level":
        if type(value) is int and 0 <= value <= _MAX_VERBOSE_LEVEL:
            return value
        raise InvalidRequestError(f"expect unsigned integer for '{name}', got {shown}", param=name)
    if name == "log_format":
        if isinstance(value, str) and value in _FORMATS:
            return value
        raise InvalidRequestError(
            f"invalid argument for --log_format, got: {shown}; the formats are "
            f"{', '.join(_FORMATS)}",
            param=name,
        )
    if isinstance(value, bool):
        return value
    raise InvalidRequestError(f"expect boolean for '{name}', got {shown}", param=name)


_SEE = "see the server's settings"
_CHANGE = "change the server's settings or models"


class Management:
    def __init__(self, catalog: Catalog, *, sends_traces: bool = False) -> None:
        self._catalog = catalog
        self._traces = KeptTraceSettings(sends_traces=sends_traces)
        self._logs = LiveLogSettings()

    def change_trace(
        self,
        principal: Principal,
        model: str,
        changes: Mapping[str, Sequence[str] | None] = MappingProxyType({}),
    ) -> dict[str, TraceValue]:
        """Return the trace settings of a model, or without a name of the server, as changed."""
        principal.require_operator(_CHANGE if changes else _SEE)
        if model:
            try:
                self._catalog.find(model)
            except ModelNotFoundError:
                raise InvalidRequestError(
                    f"Request for unknown model : {model}", param="model"
                ) from None
        return self._traces.update(changes, model)

    def change_log(
        self, principal: Principal, changes: Mapping[str, object] = MappingProxyType({})
    ) -> dict[str, LogValue]:
        """Return the log settings as changed."""
        principal.require_operator(_CHANGE if changes else _SEE)
        return self._logs.update(changes)

    def index(
        self, principal: Principal, repository: str, *, only_ready: bool
    ) -> list[dict[str, str]]:
        _check_repository(repository)
        return self._catalog.index(only_ready=only_ready, principal=principal)

    async def load(
        self, principal: Principal, repository: str, model: str, parameters: Mapping[str, object]
    ) -> None:
        _check_repository(repository)
        principal.require_operator(_CHANGE)
        await self._catalog.load(model, parameters)

    def unload(
        self, principal: Principal, repository: str, model: str, parameters: Mapping[str, object]
    ) -> None:
        _check_repository(repository)
        principal.require_operator(_CHANGE)
        self._catalog.unload(model, with_dependents=unloads_dependents(parameters))


def _check_repository(name: str) -> None:
    if name:
        raise UnsupportedFeatureError("'repository_name' specification is not supported")
