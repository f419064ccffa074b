"""tritonclient over either wire, its errors in our words."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tritonclient.grpc as triton_grpc
from tritonclient.grpc import InferenceServerClientPlugin
from tritonclient.utils import InferenceServerException

from loraplex.compat.client.connection_options import GrpcOptions, TlsOptions
from loraplex.compat.client.flags import check_choice
from loraplex.core.environment import KEY_HINT, client_headers
from loraplex.core.errors import ConfigError

_COMPRESSIONS = ("none", "deflate", "gzip")
_NO_KEY = "StatusCode.UNAUTHENTICATED"


@contextlib.contextmanager
def grpc_client(options: GrpcOptions) -> Iterator[Any]:
    """An InferenceServerClient. Raises ConfigError for flags that do not fit and for what the
    server, or the way to it, raised.
    """
    tls = _tls(options)
    if isinstance(options, TlsOptions):
        check_choice(
            "--grpc-compression-algorithm",
            options.grpc_compression_algorithm or "none",
            _COMPRESSIONS,
        )
    with told_errors(options.url), triton_grpc.InferenceServerClient(options.url, **tls) as client:
        client.register_plugin(_WithKey())
        yield client


class _WithKey(InferenceServerClientPlugin):  # type: ignore[misc]
    """Every call says who asks, if the environment does."""

    def __init__(self) -> None:
        self._headers = client_headers()

    def __call__(self, request: Any) -> None:
        request.headers.update(self._headers)


@contextlib.contextmanager
def told_errors(url: str) -> Iterator[None]:
    """What a server answers instead of a result becomes a ConfigError."""
    try:
        yield
    except InferenceServerException as error:
        raise told(error, url) from error


def told(error: InferenceServerException, url: str) -> ConfigError:
    """With the status, where there is one."""
    status = error.status()
    text = f"the server at {url} answered: {error.message()}" + (f" ({status})" if status else "")
    return ConfigError(f"{text}; {KEY_HINT}" if status == _NO_KEY else text)


def is_cancelled(error: Exception) -> bool:
    status = error.status() if isinstance(error, InferenceServerException) else None
    return status is not None and status.endswith("CANCELLED")


def compression(options: TlsOptions) -> str | None:
    """As tritonclient's calls take it."""
    name = options.grpc_compression_algorithm
    return None if name == "none" else name


def is_decoupled(client: Any, model: str) -> bool:
    """Whether a model gives any number of answers; then only a stream can take them."""
    config = client.get_model_config(model).config
    return bool(config.model_transaction_policy.decoupled)


def _tls(options: GrpcOptions) -> dict[str, Any]:
    files = {"root_certificates": options.root_certificates}
    if isinstance(options, TlsOptions):
        files |= {
            "private_key": options.private_key,
            "certificate_chain": options.certificate_chain,
        }
    given = {name: path for name, path in files.items() if path is not None}
    if given and not options.ssl:
        flag = next(iter(given)).replace("_", "-")
        raise ConfigError(f"--{flag} has no effect without --ssl")
    for name, path in given.items():
        if not Path(path).is_file():
            raise ConfigError(f"--{name.replace('_', '-')}: there is no file {path}")
    return {"ssl": options.ssl, **given}
