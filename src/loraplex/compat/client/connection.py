"""gRPC clients of tritonclient, with keys and TLS from the flags, and its errors as ours."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tritonclient.grpc as triton_grpc
from tritonclient.grpc import InferenceServerClientPlugin
from tritonclient.utils import InferenceServerException

from loraplex.compat.flags import Flags
from loraplex.core.environment import KEY_HINT, client_headers
from loraplex.core.errors import ConfigError

_NO_KEY = "StatusCode.UNAUTHENTICATED"
_TLS_FILES = ("root_certificates", "private_key", "certificate_chain")


@contextlib.contextmanager
def grpc_client(url: str, options: Flags | None = None) -> Iterator[Any]:
    """Open an InferenceServerClient, with TLS if the options of the program request it.

    Raises ConfigError for flags that contradict each other and for errors of the server.
    """
    tls = _tls(options) if options else {}
    with server_errors(url), triton_grpc.InferenceServerClient(url, **tls) as client:
        client.register_plugin(_WithKey())
        yield client


class _WithKey(InferenceServerClientPlugin):  # type: ignore[misc]
    """Plugin that adds the API key of the environment to every call."""

    def __init__(self) -> None:
        self._headers = client_headers()

    def __call__(self, request: Any) -> None:
        request.headers.update(self._headers)


@contextlib.contextmanager
def server_errors(url: str) -> Iterator[None]:
    """Raise the errors of tritonclient as ConfigErrors."""
    try:
        yield
    except InferenceServerException as error:
        raise server_error(error, url) from error


def server_error(error: InferenceServerException, url: str) -> ConfigError:
    """Return the error, with its status if it has one."""
    status = error.status()
    text = f"the server at {url} answered: {error.message()}" + (f" ({status})" if status else "")
    return ConfigError(f"{text}; {KEY_HINT}" if status == _NO_KEY else text)


def is_decoupled(client: Any, model: str) -> bool:
    """Return whether a model gives any number of responses, which only a stream can carry."""
    config = client.get_model_config(model).config
    return bool(config.model_transaction_policy.decoupled)


def _tls(options: Flags) -> dict[str, Any]:
    given = {name: path for name in _TLS_FILES if (path := options.get(name)) is not None}
    for name, path in given.items():
        flag = f"--{name.replace('_', '-')}"
        if not options.ssl:
            raise ConfigError(f"{flag} has no effect without --ssl")
        if not Path(path).is_file():
            raise ConfigError(f"{flag}: there is no file {path}")
    return {"ssl": options.ssl, **given}
