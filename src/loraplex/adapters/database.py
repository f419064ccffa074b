"""The adapter store's tables in SQLite: names, aliases, and the history of every name.

A change is one transaction: after a crash it is complete or absent. The index has the present
versions, and changes once a transaction is on the disk. The database has no rules: the store
decides what may be registered, rolled back or forgotten. One thread uses it at a time.
"""

import contextlib
import functools
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from loraplex.adapters.durable_files import (
    FileIdentity,
    Reserve,
    identity_of,
    storage_full,
    storage_unavailable,
)
from loraplex.adapters.index import AdapterIndex
from loraplex.adapters.staged import StagedAdapter
from loraplex.adapters.version import AdapterVersion, Owner, VersionOrigin
from loraplex.core.errors import ConfigError, InternalError, LoraplexError

DATABASE_NAME = "adapters.sqlite3"
IN_MEMORY = ":memory:"
SCHEMA_VERSION = 1
_RESERVE_BYTES = 1 << 20
"""Disk space for removals. The removal of a name writes some pages of 4 KiB to the log."""
_LOCK_SECONDS = 0.2
"""Time to wait for another program. StateLock keeps another server out."""

_UNAVAILABLE = frozenset(
    {
        *(sqlite3.SQLITE_READONLY, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN),
        *(sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_PERM, sqlite3.SQLITE_AUTH),
        *(sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_PROTOCOL),
    }
)
"""Errors about the file, and not about the program that uses it."""

# SQLite's integers are signed: a task id, a uint64, is text.
_SCHEMA = """
CREATE TABLE adapters (
    id INTEGER PRIMARY KEY,
    model TEXT NOT NULL,
    tenant TEXT NOT NULL,
    name TEXT NOT NULL,
    task_id TEXT,
    number INTEGER NOT NULL,
    UNIQUE (model, tenant, name),
    UNIQUE (model, tenant, task_id)
);
CREATE TABLE versions (
    adapter INTEGER NOT NULL REFERENCES adapters (id) ON DELETE CASCADE,
    number INTEGER NOT NULL,
    digest TEXT NOT NULL,
    path TEXT NOT NULL,
    created INTEGER NOT NULL,
    origin TEXT NOT NULL,
    restored INTEGER,
    pinned INTEGER NOT NULL,
    staged TEXT NOT NULL,
    PRIMARY KEY (adapter, number)
);
CREATE TABLE aliases (
    model TEXT NOT NULL,
    tenant TEXT NOT NULL,
    name TEXT NOT NULL,
    adapter INTEGER NOT NULL REFERENCES adapters (id) ON DELETE CASCADE,
    PRIMARY KEY (model, tenant, name)
);
CREATE INDEX versions_by_digest ON versions (digest);
CREATE INDEX aliases_by_adapter ON aliases (adapter);
"""
_VERSION = """
SELECT model, tenant, name, task_id, v.number, path, created, origin, restored, pinned, staged
FROM versions AS v JOIN adapters AS a ON a.id = v.adapter
"""
_OF_NAME = "(SELECT id FROM adapters WHERE model = ? AND tenant = ? AND name = ?)"


_NamedFiles = tuple[FileIdentity | None, ...]


class AdapterDatabase:
    """Connection to the database, which excludes every other one while it is open."""

    def __init__(self, path: Path | str, file_path: Callable[[str], str] | None = None) -> None:
        """Open or create the file. Raises ConfigError if it is foreign, broken or locked.

        file_path: returns the path of a digest's canonical adapter file: the state directory may
        have moved.
        """
        self._path = path
        self._is_in_memory = path == IN_MEMORY
        self._file_path = file_path
        self.names = AdapterIndex()
        """Present versions. Only transactions change them."""
        self._following: list[Callable[[], None]] = []
        """Changes of the index when the transaction ends."""
        self._dropped: list[str] = []
        """Digests that leave a history with the transaction."""
        try:
            # The store calls from several threads, one at a time.
            self._connection = sqlite3.connect(
                path, timeout=_LOCK_SECONDS, isolation_level=None, check_same_thread=False
            )
        except sqlite3.Error as error:
            raise ConfigError(f"cannot open the adapter store {path}: {error}") from error
        try:
            self._prepare()
            self._load()
        except (sqlite3.Error, ValueError) as error:
            self._connection.close()
            raise ConfigError(
                f"cannot use the adapter store {path}: {error}; move it away to start with none"
            ) from error
        except ConfigError:
            self._connection.close()
            raise
        self._files: _NamedFiles | None = self._named_files()
        self._reserve = (
            None if self._is_in_memory else Reserve(Path(f"{path}.reserve"), _RESERVE_BYTES)
        )

    def close(self) -> None:
        self._files = None
        self._connection.close()

    @contextlib.contextmanager
    def transaction(self) -> Iterator[list[str]]:
        """Write all changes inside to the disk, or none; yields the digests that leave a history.

        Raises StorageFullError on a full disk, StorageUnavailableError for a file that cannot be
        used, also if the files no longer have their names: what is written to a file that was
        deleted is lost with this process.
        """
        self._require_named_files()
        self._following, self._dropped = [], []
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            yield self._dropped
            self._connection.execute("COMMIT")
        except sqlite3.Error as error:
            raise self._failed("written", error) from error
        finally:
            with contextlib.suppress(sqlite3.Error):  # it was committed, or cannot be used
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
        self._require_named_files()
        for change in self._following:
            change()

    @contextlib.contextmanager
    def removal(self) -> Iterator[list[str]]:
        """Write changes that remove something, as `transaction`, on a full disk, too."""
        space = self._reserve.given_up() if self._reserve else contextlib.nullcontext()
        with space:
            with self.transaction() as dropped:
                yield dropped
            # The log begins anew: otherwise each removal would make it longer.
            with contextlib.suppress(sqlite3.Error):
                self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def history(self, version: AdapterVersion) -> list[AdapterVersion]:
        """Return the versions kept of a version's name, newest first."""
        query = f"{_VERSION} WHERE v.adapter = {_OF_NAME} ORDER BY v.number DESC"
        rows = self._select(query, (*version.owner, version.name))
        return [self._version(row) for row in rows]

    def of_digest(self, owner: Owner, digest: str) -> AdapterVersion | None:
        """Return a kept version with this digest, the newest of them."""
        query = f"{_VERSION} WHERE v.digest = ? AND a.model = ? AND a.tenant = ?"
        rows = self._select(f"{query} ORDER BY v.created DESC LIMIT 1", (digest, *owner))
        return self._version(rows[0]) if rows else None

    def digests(self) -> set[str]:
        """Return the digest of every kept version."""
        return {digest for (digest,) in self._select("SELECT digest FROM versions", ())}

    def put(self, version: AdapterVersion) -> None:
        """Write a new or known version as the present one of its name; forget later ones."""
        owner_and_name = (*version.owner, version.name)
        task_id = None if version.task_id is None else str(version.task_id)
        self._connection.execute(
            "INSERT INTO adapters (model, tenant, name, task_id, number) VALUES (?, ?, ?, ?, ?) "
            "ON CONFLICT (model, tenant, name) "
            "DO UPDATE SET task_id = excluded.task_id, number = excluded.number",
            (*owner_and_name, task_id, version.number),
        )
        self._drop_versions(
            version,
            "number > ? OR (number = ? AND digest != ?)",
            (version.number, version.number, version.digest),
        )
        self._connection.execute(
            f"INSERT OR REPLACE INTO versions VALUES ({_OF_NAME}, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                *owner_and_name,
                version.number,
                version.digest,
                version.path,
                version.created,
                version.origin.value,
                version.restored,
                version.is_pinned,
                msgspec.json.encode(version.staged).decode(),
            ),
        )
        self._following.append(functools.partial(self.names.put, version))

    def set_pinned(self, version: AdapterVersion) -> None:
        self._connection.execute(
            f"UPDATE versions SET pinned = ? WHERE adapter = {_OF_NAME} AND number = ?",
            (version.is_pinned, *version.owner, version.name, version.number),
        )
        present = self.names.version(version.owner, version.name)
        if present is not None and present.number == version.number:
            self._following.append(functools.partial(self.names.put, version))

    def trim(self, version: AdapterVersion, max_versions: int) -> None:
        """Limit the history of a version's name; pinned versions stay in addition."""
        newest = f"SELECT number FROM versions WHERE adapter = {_OF_NAME} ORDER BY number DESC"
        self._drop_versions(
            version,
            f"NOT pinned AND number NOT IN ({newest} LIMIT ?)",
            (*version.owner, version.name, max_versions),
        )

    def drop(self, version: AdapterVersion) -> None:
        """Delete a name with its history and its aliases."""
        self._drop_versions(version, "TRUE", ())
        self._connection.execute(
            "DELETE FROM adapters WHERE model = ? AND tenant = ? AND name = ?",
            (*version.owner, version.name),
        )
        self._following.append(functools.partial(self.names.drop, version))

    def put_alias(self, owner: Owner, alias: str, name: str) -> None:
        self._connection.execute(
            f"INSERT OR REPLACE INTO aliases VALUES (?, ?, ?, {_OF_NAME})",
            (*owner, alias, *owner, name),
        )
        self._following.append(functools.partial(self.names.put_alias, owner, alias, name))

    def drop_alias(self, owner: Owner, alias: str) -> None:
        self._connection.execute(
            "DELETE FROM aliases WHERE model = ? AND tenant = ? AND name = ?", (*owner, alias)
        )
        self._following.append(functools.partial(self.names.drop_alias, owner, alias))

    def _load(self) -> None:
        """Put the present version of each name, the oldest name first, and the aliases into the
        index."""
        for row in self._connection.execute(f"{_VERSION} WHERE v.number = a.number ORDER BY a.id"):
            self.names.put(self._version(row))
        for model, tenant, alias, name in self._connection.execute(
            "SELECT s.model, s.tenant, s.name, a.name "
            "FROM aliases AS s JOIN adapters AS a ON a.id = s.adapter"
        ):
            self.names.put_alias((model, tenant), alias, name)

    def _drop_versions(
        self, version: AdapterVersion, condition: str, values: tuple[Any, ...]
    ) -> None:
        """Delete those versions of a name that meet a condition."""
        which = f"FROM versions WHERE adapter = {_OF_NAME} AND ({condition})"
        values = (*version.owner, version.name, *values)
        found = self._connection.execute(f"SELECT digest {which}", values)
        self._dropped += [digest for (digest,) in found]
        self._connection.execute(f"DELETE {which}", values)

    def _named_files(self) -> _NamedFiles:
        """Return which files have the names of the database and of its write-ahead log."""
        if self._is_in_memory:
            return ()
        return identity_of(Path(self._path)), identity_of(Path(f"{self._path}-wal"))

    def _require_named_files(self) -> None:
        if self._files is not None and self._named_files() != self._files:
            raise storage_unavailable(
                f"the adapter store {self._path} was deleted or replaced while the server runs; "
                "restart the server"
            )

    def _select(self, query: str, values: tuple[Any, ...]) -> list[tuple[Any, ...]]:
        try:
            return self._connection.execute(query, values).fetchall()
        except sqlite3.Error as error:
            raise self._failed("read", error) from error

    def _failed(self, done: str, error: sqlite3.Error) -> LoraplexError:
        """Return the error for a database that cannot be used; done: a participle."""
        # Extended codes have the primary one in their last byte.
        code = (getattr(error, "sqlite_errorcode", None) or 0) & 0xFF
        if code == sqlite3.SQLITE_FULL:
            return storage_full(str(error))
        what = f"the adapter store {self._path} cannot be {done}: {error}"
        return storage_unavailable(what) if code in _UNAVAILABLE else InternalError(what)

    def _prepare(self) -> None:
        connection = self._connection
        # Exclusive: needs no shared memory next to the file, so any file system will do.
        connection.execute("PRAGMA locking_mode = EXCLUSIVE")
        connection.execute("PRAGMA journal_mode = WAL")
        # A confirmed change survives a loss of power, not only the death of the process.
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA foreign_keys = ON")
        (schema_version,) = connection.execute("PRAGMA user_version").fetchone()
        if schema_version == 0:
            connection.executescript(
                f"BEGIN IMMEDIATE; {_SCHEMA} PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;"
            )
        elif schema_version != SCHEMA_VERSION:
            raise ConfigError(
                f"the adapter store {self._path} has schema {schema_version}; this version of "
                f"loraplex reads {SCHEMA_VERSION}. Run the version that wrote it, or move it away"
            )

    def _version(self, row: tuple[Any, ...]) -> AdapterVersion:
        model, tenant, name, task_id, number, path, created, origin, restored, pinned, staged = row
        adapter = msgspec.json.decode(staged, type=StagedAdapter)
        if self._file_path is not None:
            file_path = self._file_path(adapter.source.digest)
            source = msgspec.structs.replace(adapter.source, path=file_path)
            adapter = msgspec.structs.replace(adapter, source=source)
        return AdapterVersion(
            model=model,
            tenant=tenant,
            name=name,
            task_id=None if task_id is None else int(task_id),
            number=number,
            staged=adapter,
            path=path,
            created=created,
            origin=VersionOrigin(origin),
            restored=restored,
            is_pinned=bool(pinned),
        )
