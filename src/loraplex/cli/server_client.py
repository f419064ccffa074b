"""Client of a running server: JSON over HTTP, with the standard library alone.

It trusts the system's certificates, or those of the file that SSL_CERT_FILE names.
"""

import http.client
import json
import ssl
import urllib.error
import urllib.parse
import urllib.request
from http import HTTPStatus
from typing import Any

from loraplex.core.environment import KEY_HINT, client_headers
from loraplex.core.errors import ConfigError, ErrorInfo, error_from_info

_TIMEOUT_SECONDS = 900.0
"""A load from a slow disk may take minutes."""


class ServerClient:
    """One server. Every method raises the server's error, or ConfigError without a response."""

    def __init__(self, url: str) -> None:
        scheme, _, host = url.partition("://")
        if scheme not in ("http", "https") or not host:
            raise ConfigError(f"--url must be http://HOST:PORT, got {url!r}")
        self._url = url.rstrip("/")

    def get(self, path: str) -> Any:
        return self._send("GET", path)

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """Send the fields that are not None."""
        sent = {name: value for name, value in body.items() if value is not None}
        return self._send("POST", path, json.dumps(sent).encode())

    def delete(self, path: str) -> Any:
        return self._send("DELETE", path)

    def _send(self, method: str, path: str, data: bytes | None = None) -> Any:
        request = urllib.request.Request(
            self._url + path, data, {"Content-Type": "application/json"}, method=method
        )
        for (
            name,
            value,
        ) in client_headers().items():  # for this server, not for one that it redirects to
            request.add_unredirected_header(name.title(), value)
        try:
            with urllib.request.urlopen(request, timeout=_TIMEOUT_SECONDS) as response:
                return json.load(response)
        except urllib.error.HTTPError as error:
            with error:
                raise _error(error.code, error.read()) from None
        except (OSError, ValueError) as error:
            reason = getattr(error, "reason", error)
            raise ConfigError(
                f"there is no response from {self._url}: {reason}{self._hint(error)}"
            ) from error

    def _hint(self, error: Exception) -> str:
        """Return advice for errors of TLS."""
        reason = getattr(error, "reason", error)
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
