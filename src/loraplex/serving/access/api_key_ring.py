"""The keys that a server takes: those of its file, which is followed, and of its environment."""

import asyncio
import logging
import os
import re
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from loraplex.core.errors import ConfigError, UnauthenticatedError
from loraplex.core.principal import DEFAULT_TENANT, Principal
from loraplex.serving.access.api_keys import check_strength, find_hash, hash_of
from loraplex.serving.access.key_file import (
    EMPTY,
    KeyFile,
    is_tenant,
    principal_of,
    read_key_file,
)

logger = logging.getLogger(__name__)

LOOK_SECONDS = 1.0
"""How often the file is looked at: a revoked key is taken for so long."""
_SEPARATORS = re.compile(r"[\s,]+")
_VARIABLE = "environment variable LORAPLEX_API_KEYS"


class _Snapshot(msgspec.Struct, frozen=True):
    """All keys at one moment: the hash at a place belongs to the principal there."""

    hashes: tuple[bytes, ...]
    principals: tuple[Principal, ...]


class ApiKeys:
    """Whoever asks sees all keys of one moment: a change is one assignment. Any thread may ask."""

    def __init__(self, path: Path | None, variable: str = "", given: Sequence[str] = ()) -> None:
        """path: of a key file; None: there is none. variable: keys, divided by commas or spaces,
        as KEY (of the server's own tenant) or TENANT:KEY; given: more of the server's own, however
        weak. Raises ConfigError for a bad one.
        """
        self._path = path
        self._refreshing = threading.Lock()
        self._of_environment = _keys_of(variable) | _given(given)
        self._seen = None if path is None else _signature(path)
        file = EMPTY if path is None else read_key_file(path)
        self._snapshot = _snapshot(file, self._of_environment)
        if not self._snapshot.hashes:
            logger.warning("%s holds no valid key: every request is refused", path)

    def principal(self, key: str) -> Principal:
        """Raises UnauthenticatedError, which does not tell the key."""
        snapshot = self._snapshot
        found = find_hash(hash_of(key), snapshot.hashes)
        if found is None:
            raise UnauthenticatedError("the API key is not known here")
        return snapshot.principals[found]

    def refresh(self) -> None:
        """Look at the file, and take its keys if it changed. Blocks.

        A file that cannot be read, or is wrong, changes nothing, and the log says so once.
        """
        if self._path is None:
            return
        # One at a time: who has read an older file must not have the last word.
        with self._refreshing:
            self._take(self._path)

    def _take(self, path: Path) -> None:
        signature = _signature(path)
        if signature == self._seen:
            return
        self._seen = signature
        try:
            snapshot = _snapshot(read_key_file(path), self._of_environment)
        except ConfigError as error:
            logger.error("the API keys stay as they were: %s", error.message)
            return
        self._snapshot = snapshot
        logger.info("%d API keys are valid after a change of %s", len(snapshot.hashes), path)

    async def follow(self) -> None:
        """Refresh again and again, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            await asyncio.to_thread(self.refresh)


def _given(keys: Sequence[str]) -> dict[bytes, str]:
    for key in keys:
        try:
            check_strength(key, "the key of a flag")
        except ConfigError as error:
            logger.warning("%s; it is taken all the same", error.message)
    return {hash_of(key): DEFAULT_TENANT for key in keys}


def _signature(path: Path) -> tuple[int, int, int] | None:
    """Another one for another content; None: nothing can be seen there."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


def _snapshot(file: KeyFile, of_environment: Mapping[bytes, str]) -> _Snapshot:
    tenants = {bytes.fromhex(key.sha256): key.tenant for key in file.valid_keys}
    revoked = {bytes.fromhex(key.sha256) for key in file.keys if key.id in file.revoked}
    for key_hash, tenant in of_environment.items():
        if key_hash not in revoked:
            tenants.setdefault(key_hash, tenant)
    principals = {name: principal_of(file.tenants, name) for name in set(tenants.values())}
    return _Snapshot(tuple(tenants), tuple(principals[name] for name in tenants.values()))


def _keys_of(variable: str) -> dict[bytes, str]:
    """hash -> tenant"""
    tenants = {}
    for entry in filter(None, _SEPARATORS.split(variable)):
        before, colon, after = entry.partition(":")
        tenant, key = (before, after) if colon else (DEFAULT_TENANT, before)
        check_strength(key, _VARIABLE)
        if not is_tenant(tenant):
            # Not told what it is: perhaps a part of a key that has a colon.
            raise ConfigError(f"{_VARIABLE}: what stands before a colon is no tenant's name")
        tenants[hash_of(key)] = tenant
    return tenants
