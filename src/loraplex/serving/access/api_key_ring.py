"""API keys that a server accepts, from a file that it follows and from its environment."""

import asyncio
import logging
import os
import re
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from loraplex.core.errors import ConfigError, UnauthenticatedError
from loraplex.core.principal import DEFAULT_TENANT, Principal
from loraplex.serving.access.api_keys import check_strength, digest_of
from loraplex.serving.access.key_file import (
    EMPTY,
    KeyFile,
    is_tenant,
    principal_of,
    read_key_file,
)

logger = logging.getLogger(__name__)

LOOK_SECONDS = 1.0
"""Interval between looks at the file: a revoked key is accepted for so long."""
_SEPARATORS = re.compile(r"[\s,]+")
_VARIABLE = "environment variable LORAPLEX_API_KEYS"


class ApiKeys:
    """Finds the principal of a key. Any thread may call; a change is one assignment.

    Keys are found by their SHA-256 in a dict. The time of a lookup may depend on the digest, which
    reveals nothing: a client cannot choose the digest of a key that it tries.
    """

    def __init__(self, path: Path | None, variable: str = "", given: Sequence[str] = ()) -> None:
        """Read the key file at `path`, if there is one.

        `variable` has more keys, separated by commas or spaces: KEY for the server's own tenant, or
        TENANT:KEY. `given` has more keys of the server's own tenant, which may be weak. Raises
        ConfigError for an invalid one.
        """
        self._path = path
        self._refreshing = threading.Lock()
        self._of_environment = _keys_of(variable) | _given(given)
        self._seen = None if path is None else _signature(path)
        self._file = EMPTY if path is None else read_key_file(path)
        self._principals = _principals_by_digest(self._file, self._of_environment)
        if not self._principals:
            logger.warning(
                "%s holds no valid key, so every request is refused: see `loraplex keys create`",
                path,
            )

    def principal(self, key: str) -> Principal:
        """Return the principal of a key.

        Raises UnauthenticatedError, which does not contain the key.
        """
        principal = self._principals.get(digest_of(key))
        if principal is None:
            raise UnauthenticatedError("this server does not know the API key")
        return principal

    def refresh(self) -> None:
        """Read the file again if it changed. Blocks.

        A file that cannot be read, is invalid, or has lost all its entries changes nothing; the log
        reports it once.
        """
        if self._path is None:
            return
        # One thread at a time: one that has read an older file must not win.
        with self._refreshing:
            self._take(self._path)

    def _take(self, path: Path) -> None:
        signature = _signature(path)
        if signature == self._seen:
            return
        self._seen = signature
        try:
            file = read_key_file(path)
            _check_entries_left(self._file, file, path)
        except ConfigError as error:
            logger.error("the API keys stay as they were: %s", error.message)
            return
        self._file = file
        self._principals = _principals_by_digest(file, self._of_environment)
        logger.info("%s after a change: valid API keys: %d", path, len(self._principals))

    async def follow(self) -> None:
        """Refresh periodically until cancelled."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            await asyncio.to_thread(self.refresh)


def _check_entries_left(old: KeyFile, new: KeyFile, path: Path) -> None:
    """Raise ConfigError for a file that has lost all its tenants or all its keys.

    Writers truncate a file before they write it. Its beginning (nothing, a comment, the tenants) is
    valid TOML, and would revoke every key for a moment.
    """
    for name, before, after in (
        ("[tenants.NAME]", old.tenants, new.tenants),
        ("[[keys]]", old.keys, new.keys),
    ):
        if before and not after:
            raise ConfigError(
                f"{path} has no {name} any more, as if it were still being written: to refuse all "
                "keys, revoke each (loraplex keys revoke), or restart the server"
            )


def _given(keys: Sequence[str]) -> dict[bytes, str]:
    for key in keys:
        try:
            check_strength(key, "the key of a flag")
        except ConfigError as error:
            logger.warning("%s; it is accepted anyway", error.message)
    return {digest_of(key): DEFAULT_TENANT for key in keys}


def _signature(path: Path) -> tuple[int, int, int] | None:
    """Return a value that differs for another content, or None if there is no readable file."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


def _principals_by_digest(
    file: KeyFile, of_environment: Mapping[bytes, str]
) -> Mapping[bytes, Principal]:
    tenants = {bytes.fromhex(key.sha256): key.tenant for key in file.valid_keys}
    revoked = {bytes.fromhex(key.sha256) for key in file.keys if key.id in file.revoked}
    for digest, tenant in of_environment.items():
        if digest not in revoked:
            tenants.setdefault(digest, tenant)
    principals = {name: principal_of(file.tenants, name) for name in set(tenants.values())}
    return {digest: principals[tenant] for digest, tenant in tenants.items()}


def _keys_of(variable: str) -> dict[bytes, str]:
    """Return the tenant of each digest."""
    tenants = {}
    for entry in filter(None, _SEPARATORS.split(variable)):
        before, colon, after = entry.partition(":")
        tenant, key = (before, after) if colon else (DEFAULT_TENANT, before)
        check_strength(key, _VARIABLE)
        if not is_tenant(tenant):
            # The text is left out: it may be a part of a key that has a colon.
            raise ConfigError(f"{_VARIABLE}: the text before a colon is not a tenant's name")
        tenants[digest_of(key)] = tenant
    return tenants
