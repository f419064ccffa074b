"""Certificate of the server, for every port: read and checked at the start, and again when its
files change."""

import asyncio
import logging
import os
import ssl
from pathlib import Path

from loraplex.app.serving_process import alongside
from loraplex.core.errors import ConfigError
from loraplex.core.server_config import ServerConfig

logger = logging.getLogger(__name__)

LOOK_SECONDS = 5.0
"""Interval between looks at the files: a new certificate is used from then on."""


class Certificates:
    """Files in PEM form that belong together.

    Connections keep the certificate that they began with. Any thread may read the pair.
    """

    def __init__(self, certificate: str, key: str) -> None:
        """Read the files. Raises ConfigError that names the file.

        certificate: the server's own certificate first, then those of its issuers.
        """
        self.certificate = certificate
        self.key = key
        self._contexts: list[ssl.SSLContext] = []
        self._seen = self._signature()
        _check(certificate, key)
        self._pair = self._read()

    def pair(self) -> tuple[bytes, bytes]:
        """Return (key, certificates), as gRPC takes them."""
        return self._pair

    def renew(self, context: ssl.SSLContext) -> None:
        """Load each new certificate into a context that has the present one."""
        self._contexts.append(context)

    def refresh(self) -> None:
        """Read the files again if they changed. Blocks.

        Files that do not belong together change nothing; the log reports it once.
        """
        signature = self._signature()
        if signature == self._seen:
            return
        self._seen = signature
        try:
            _check(self.certificate, self.key)
            pair = self._read()
            for context in self._contexts:
                context.load_cert_chain(self.certificate, self.key)
        except (ConfigError, OSError) as error:  # an SSLError is an OSError
            reason = error.message if isinstance(error, ConfigError) else error
            logger.error("the certificate stays as it was: %s", reason)
            return
        self._pair = pair
        logger.info("the certificate %s is read again", self.certificate)

    @alongside
    async def following(self) -> None:
        """Follow changes of the files while the context lasts."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            await asyncio.to_thread(self.refresh)

    def _read(self) -> tuple[bytes, bytes]:
        return Path(self.key).read_bytes(), Path(self.certificate).read_bytes()

    def _signature(self) -> list[tuple[int, int, int] | None]:
        """Return a value that differs for other content. Kubernetes changes the link of a folder,
        so the files of a secret are other files each time."""
        return [_signature(self.certificate), _signature(self.key)]


def _signature(path: str) -> tuple[int, int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


def certificates(server: ServerConfig) -> Certificates | None:
    """Return the certificate, or None for plain text. Raises ConfigError that names the file."""
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
    return Certificates(server.tls_cert, server.tls_key)


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
            f"tls_cert {certificate} and tls_key {key} are not a certificate and its key in PEM "
            f"form: {reason}"
        ) from None
