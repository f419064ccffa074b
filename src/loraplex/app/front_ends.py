"""The front ends of one server, composed from its configuration; they open no port.

`app.server` serves them on ports, `deploy.ray` in a replica of Ray Serve.
"""

import asyncio
import contextlib
import dataclasses
import functools
from collections.abc import AsyncIterator, Sequence

from starlette.types import ASGIApp

from loraplex.app.access import api_keys, authenticate_by, following, guarded_metrics
from loraplex.app.builder import build_service
from loraplex.app.dialects import check_start_tokens, dialect_of, prepare
from loraplex.app.http_app import http_app
from loraplex.app.model_settings import with_fair_share, with_local_path
from loraplex.app.reporting import Reporting, reporting_requests
from loraplex.app.serving_process import alongside
from loraplex.core.config import Config, ModelConfig
from loraplex.core.errors import ConfigError
from loraplex.core.metrics_config import read_metrics_config
from loraplex.core.server_config import ServerConfig
from loraplex.frontends.access import Authenticate
from loraplex.frontends.body_limits import BodyMemory
from loraplex.frontends.kserve.models.model_control import ModelControl
from loraplex.frontends.kserve.models.triton_model import ModelDeclaration
from loraplex.frontends.kserve.service import TritonService
from loraplex.frontends.ops.engine_families import declaration_collector
from loraplex.frontends.ops.frontend_numbers import FrontendNumbers, OtherFrontends
from loraplex.frontends.ops.history import History
from loraplex.frontends.ops.latencies import Latencies
from loraplex.frontends.ops.metrics import MetricsLimits, metrics_app
from loraplex.serving.access.api_key_ring import ApiKeys
from loraplex.serving.engines.link import EngineLauncher
from loraplex.serving.request_metrics import RequestMetrics
from loraplex.serving.service import Service


@dataclasses.dataclass(frozen=True)
class FrontEnds:
    """A service that has not started, and what serves it."""

    service: Service
    app: ASGIApp
    """App of the HTTP port."""
    metrics: ASGIApp
    """App of the metrics port."""
    triton: TritonService
    reporting: Reporting
    keys: ApiKeys | None
    authenticate: Authenticate
    bodies: BodyMemory
    config: Config

    async def start(self) -> None:
        """Start the engines, load the configured adapters, be ready. Raises why it cannot."""
        await self.service.start()
        await prepare(self.service, self.config)


@contextlib.asynccontextmanager
async def front_ends(
    config: Config,
    launch: EngineLauncher,
    declarations: Sequence[ModelDeclaration] = (),
    control: ModelControl | None = None,
    given_keys: Sequence[str] = (),
    others: OtherFrontends | None = None,
) -> AsyncIterator[FrontEnds]:
    """Compose the front ends; the context's end closes the service.

    Arguments as for `Server`. others: the other front-end processes.
    """
    settings = config.server
    _check_processes(settings, others)
    keys = api_keys(settings, given_keys)
    authenticate, has_keys = authenticate_by(keys), keys is not None
    metrics = RequestMetrics(config.models)
    async with contextlib.AsyncExitStack() as stack:
        reporting = stack.enter_context(reporting_requests(settings))
        service = build_service(config, launch, metrics, has_keys=has_keys)
        stack.push_async_callback(service.close)
        check_start_tokens(service, config)
        triton = TritonService(
            service,
            declarations=declarations,
            control=control,
            sends_traces=reporting.traces is not None,
            metrics=read_metrics_config(settings.metrics_config),
            start_model=functools.partial(_start_model, service, settings.state_dir, has_keys),
        )
        await stack.enter_async_context(following(keys))
        bodies = BodyMemory.of(settings, has_keys=has_keys)
        numbers = None if others is None else others.numbers
        latencies = Latencies(metrics, numbers)
        history = History(service, latencies)
        await stack.enter_async_context(alongside(history.follow)())
        exposed = _exposed_metrics(service, metrics, triton, reporting, settings, numbers)
        scraped = guarded_metrics(exposed, authenticate)
        app = http_app(
            service,
            service.draining,
            triton,
            config,
            authenticate,
            reporting,
            metrics=scraped,
            history=history,
            latencies=latencies,
            bodies=bodies,
            responses=service.responses,
            dialect=dialect_of(config),
            has_keys=has_keys,
            others=others,
        )
        yield FrontEnds(
            service, app, scraped, triton, reporting, keys, authenticate, bodies, config
        )


def _check_processes(settings: ServerConfig, others: OtherFrontends | None) -> None:
    """Raise ConfigError for several front-end processes of a server that opens no port."""
    if settings.frontend_processes > 1 and others is None:
        raise ConfigError(
            f"frontend_processes is {settings.frontend_processes}, but this server opens no port "
            "that processes could share: leave it at 1, and add replicas"
        )


def _exposed_metrics(
    service: Service,
    metrics: RequestMetrics,
    triton: TritonService,
    reporting: Reporting,
    settings: ServerConfig,
    numbers: FrontendNumbers | None,
) -> ASGIApp:
    """Return the app of the metrics of all parts of the server."""
    collectors = [*triton.collectors(), *reporting.collectors()]
    if service.declared is not None:
        collectors.append(declaration_collector(service.declared.status))
    return metrics_app(
        service,
        metrics,
        collectors,
        triton.catalog.has_vllm_gauges,
        MetricsLimits.of(settings),
        numbers,
    )


async def _start_model(
    service: Service, state_dir: str, has_keys: bool, name: str, model: ModelConfig
) -> None:
    local = await asyncio.to_thread(with_local_path, name, model, state_dir)
    await service.start_model(name, with_fair_share(local, has_keys=has_keys))
