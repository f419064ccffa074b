"""Certificate of the server: read and checked once, for every port."""

import ssl
from pathlib import Path

import msgspec

from loraplex.core.errors import ConfigError
from loraplex.core.server_config import ServerConfig


class TlsFiles(msgspec.Struct, frozen=True):
    """Files in PEM form that belong together."""

    certificate: str
    """The server's own certificate first, then those of its issuers."""
    key: str

    def read(self) -> tuple[bytes, bytes]:
        """Return (key, certificates), as gRPC takes them."""
        return Path(self.key).read_bytes(), Path(self.certificate).read_bytes()


def tls_files(server: ServerConfig) -> TlsFiles | None:
    """Return the files, or None for plain text. Raises ConfigError that names the file."""
    if not server.tls_cert and not server.tls_key:
        return None
    for name in ("tls_cert", "tls_key"):
        path = getattr(server, name)
        if not path:
            raise ConfigError(f"{name} is missing: TLS needs tls_cert and tls_key")
        try:
            Path(path).read_bytes()
        except OSError as error:
            raise ConfigError(f"cannot read {name} {path}: {error.strerror}") from error
    _check(server.tls_cert, server.tls_key)
    return TlsFiles(server.tls_cert, server.tls_key)


def _check(certificate: str, key: str) -> None:
    needs_password = False

    def no_password() -> bytes:
        nonlocal needs_password
        needs_password = True
        return b""

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(certificate, key, no_password)
    except (ssl.SSLError, ValueError) as error:
        if needs_password:
            raise ConfigError(
                f"tls_key {key} is encrypted: give a key that needs no password, readable by this "
                "user alone"
            ) from None
        reason = getattr(error, "reason", None) or str(error)
        raise ConfigError(
            f"tls_cert {certificate} and tls_key {key} are no certificate and its key in PEM form: "
            f"{reason}"
        ) from None
