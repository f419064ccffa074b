"""Management of the server: settings, and which models are loaded.

Used by HTTP and gRPC. All but the index, which shows a tenant its models, is for operators.
"""

from collections.abc import Mapping, Sequence

from loraplex.core.errors import (
    InvalidRequestError,
    ModelNotFoundError,
    UnsupportedFeatureError,
)
from loraplex.core.principal import Principal
from loraplex.frontends.kserve.log_settings import LogSettings, LogValue
from loraplex.frontends.kserve.models.catalog import Catalog
from loraplex.frontends.kserve.models.model_control import unloads_dependents
from loraplex.frontends.kserve.trace_settings import TraceSettings, TraceValue

_SEE = "see the server's settings"
_CHANGE = "change the server's settings or models"


class Management:
    def __init__(self, catalog: Catalog, *, sends_traces: bool = False) -> None:
        self._catalog = catalog
        self._traces = TraceSettings(sends_traces=sends_traces)
        self._logs = LogSettings()

    def trace_settings(self, principal: Principal, model: str) -> dict[str, TraceValue]:
        """Trace settings of a model, or without a name of the server."""
        principal.require_operator(_SEE)
        self._check_traced(model)
        return self._traces.of(model)

    def change_trace(
        self, principal: Principal, model: str, changes: Mapping[str, Sequence[str] | None]
    ) -> dict[str, TraceValue]:
        principal.require_operator(_CHANGE if changes else _SEE)
        self._check_traced(model)
        return self._traces.update(changes, model)

    def _check_traced(self, model: str) -> None:
        if not model:
            return
        try:
            self._catalog.find(model)
        except ModelNotFoundError:
            raise InvalidRequestError(
                f"Request for unknown model : {model}", param="model"
            ) from None

    def log_settings(self, principal: Principal) -> dict[str, LogValue]:
        principal.require_operator(_SEE)
        return self._logs.report()

    def change_log(
        self, principal: Principal, changes: Mapping[str, object]
    ) -> dict[str, LogValue]:
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
