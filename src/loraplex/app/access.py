"""API keys of a server, and the guards of its HTTP ports."""

import functools
from collections.abc import Sequence
from pathlib import Path

from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp

from loraplex.app.serving_process import alongside
from loraplex.core.environment import server_api_keys
from loraplex.core.errors import LoraplexError
from loraplex.core.server_config import ServerConfig
from loraplex.frontends.access import Authenticate, by_api_key, everyone_is_local
from loraplex.frontends.kserve.http.routes import refusal as kserve_refusal
from loraplex.frontends.middleware import Refuse, checked, host_check, key_check, page_check
from loraplex.frontends.openai.app import COHERE_PATHS
from loraplex.frontends.openai.errors import error_response as openai_refusal
from loraplex.frontends.openai.writers import DIGESTS_HEADER
from loraplex.serving.access.api_key_ring import ApiKeys

OPEN_PATHS = (
    *("/ping", "/health", "/health/live", "/health/ready"),
    *("/v1/health/live", "/v1/health/ready"),
    *("/v2/health/live", "/v2/health/ready"),
)
"""Paths that load balancers probe."""
PROBED_PATHS = (*OPEN_PATHS, "/metrics")
"""Paths that are polled."""
_SHOWN_HEADERS = ("x-request-id", "retry-after", DIGESTS_HEADER)


def api_keys(
    settings: ServerConfig, given: Sequence[str] = (), variable: str | None = None
) -> ApiKeys | None:
    """Return the keys, or None if no keys are configured.

    given: keys of the server's own tenant, from a flag of a replaced server. variable: replaces
    LORAPLEX_API_KEYS. Raises ConfigError for keys of the file or the environment that are not
    valid.
    """
    path = settings.api_keys_file
    variable = server_api_keys() if variable is None else variable
    if not path and not variable and not given:
        return None
    return ApiKeys(Path(path).expanduser() if path else None, variable, given)


def authenticate_by(keys: ApiKeys | None) -> Authenticate:
    return everyone_is_local if keys is None else by_api_key(keys)


@alongside
async def following(keys: ApiKeys | None) -> None:
    """Follow changes of the key file while the context lasts."""
    if keys is not None:
        await keys.follow()


def guarded(
    app: ASGIApp,
    authenticate: Authenticate,
    settings: ServerConfig,
    open_pages: Sequence[str] = (),
) -> ASGIApp:
    """Return the app with a check of keys, and open to pages of the configured origins.

    open_pages: need no key to be read.
    """
    open_paths = () if settings.health_needs_key else OPEN_PATHS
    keys = key_check(authenticate, open_paths=open_paths, open_pages=open_pages)
    behind = checked(app, (page_check(settings.cors_origins), keys), refusals(settings))
    if not settings.cors_origins:
        return behind
    return CORSMiddleware(
        behind,
        allow_origins=settings.cors_origins,
        allow_methods=("GET", "POST", "PUT", "DELETE"),
        allow_headers=("*",),
        expose_headers=_SHOWN_HEADERS,
    )


def served_as_known_hosts(app: ASGIApp, settings: ServerConfig, *, has_keys: bool) -> ASGIApp:
    """Return the app with a check of the Host header, where a web page could use it otherwise.

    A page has no key, and other machines' browsers reach no loopback address.
    """
    if not settings.allowed_hosts and (has_keys or not settings.is_on_loopback):
        return app
    check = host_check((settings.host, *settings.allowed_hosts))
    return checked(app, (check,), refusals(settings))


def guarded_metrics(app: ASGIApp, authenticate: Authenticate) -> ASGIApp:
    """Return the app of the metrics, which show all tenants, for operators only."""
    check = key_check(authenticate, operators_only_to="see the server's metrics")
    return checked(app, (check,), refusal)


def refusals(settings: ServerConfig) -> Refuse:
    """Return the function that makes the responses of guards."""
    return functools.partial(refusal, dialect=settings.dialect)


def refusal(path: str, error: LoraplexError, dialect: str = "openai") -> Response:
    """Return the error in the format of the front end that the path belongs to."""
    if dialect == "llgtrt_compat":
        return Response(status_code=openai_refusal(error).status_code)
    is_tritons = (path == "/v2" or path.startswith("/v2/")) and path not in COHERE_PATHS
    return kserve_refusal(error) if is_tritons else openai_refusal(error)
