"""Client of a running server: JSON over HTTP, with the standard library alone.

It trusts the system's certificates, or those of the file that SSL_CERT_FILE names.
"""

import contextlib
import json
import urllib.parse
from collections.abc import Iterator
from http import HTTPStatus
from typing import Any

from loraplex.core.environment import KEY_HINT, client_headers
from loraplex.core.errors import ConfigError, ErrorInfo, error_from_info

_TIMEOUT_SECONDS = 900.0
"""A load from a slow disk may take minutes."""


class ServerClient:
    """One server. Every method raises the server's error, or ConfigError without a response."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        """api_key: None takes it from the environment."""
        scheme, _, host = url.partition("://")
        if scheme not in ("http", "https") or not host:
            raise ConfigError(f"--url must be http://HOST:PORT, got {url!r}")
        self._url = url.rstrip("/")
        self._headers = client_headers(api_key)

    def get(self, path: str) -> Any:
        return self._send("GET", path)

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """Send the fields that are not None."""
        sent = {name: value for name, value in body.items() if value is not None}
        return self._send("POST", path, json.dumps(sent).encode())

    def delete(self, path: str) -> Any:
        return self._send("DELETE", path)

    def stream(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the server-sent events of a response. Leaving it early aborts the request."""
        with self._open("POST", path, json.dumps(body).encode()) as response:
            for line in response:
                data = line.removeprefix(b"data:").strip()
                if data == b"[DONE]":
                    return
                if line.startswith(b"data:"):
                    event = json.loads(data)
                    if "error" in event:
                        raise _error(HTTPStatus.OK, data)
                    yield event

    def _send(self, method: str, path: str, data: bytes | None = None) -> Any:
        with self._open(method, path, data) as response:
            return json.load(response)

    @contextlib.contextmanager
    def _open(self, method: str, path: str, data: bytes | None) -> Iterator[Any]:
        """Send a request, and yield its response; also errors of reading it are ConfigErrors."""
        # Commands that use no server, such as serve, should not wait for these imports.
        import http.client  # noqa: PLC0415
        import urllib.error  # noqa: PLC0415
        import urllib.request  # noqa: PLC0415

        request = urllib.request.Request(
            self._url + path, data, {"Content-Type": "application/json"}, method=method
        )
        # For this server, not for one that it redirects to.
        for name, value in self._headers.items():
            request.add_unredirected_header(name.title(), value)
        try:
            with urllib.request.urlopen(request, timeout=_TIMEOUT_SECONDS) as response:
                yield response
        except urllib.error.HTTPError as error:
            with error:
                raise _error(error.code, error.read()) from None
        except (OSError, ValueError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", error)
            raise ConfigError(
                f"there is no response from {self._url}: {reason}{self._hint(error)}"
            ) from error

    def _hint(self, error: Exception) -> str:
        """Return advice for a server that is not there, and for errors of TLS."""
        import http.client  # noqa: PLC0415 - as above
        import ssl  # noqa: PLC0415

        reason = getattr(error, "reason", error)
        if isinstance(reason, ConnectionRefusedError):
            return "; start one with `loraplex serve MODEL`, or give the address of one that runs"
        if isinstance(reason, ssl.SSLCertVerificationError):
            return "; SSL_CERT_FILE names a file of certificates to trust"
        if isinstance(error, http.client.RemoteDisconnected) and self._url.startswith("http:"):
            return "; if it speaks TLS, use https://"
        return ""


def quoted(name: str) -> str:
    """Quote an adapter's name as a part of a path; slashes stay."""
    return urllib.parse.quote(name)


def _error(status: int, body: bytes) -> Exception:
    """Return the error that the server reported."""
    try:
        error = json.loads(body)["error"]
        message = str(error["message"])
        if status == HTTPStatus.UNAUTHORIZED:
            message += f"; {KEY_HINT}"
        return error_from_info(ErrorInfo(str(error["code"]), message))
    except (ValueError, KeyError, TypeError):
        return ConfigError(f"the server returned status {status}: {body[:200]!r}")
