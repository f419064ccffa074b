"""What the store knows, kept: the index in memory and the database, always the same.

Every method that changes is one transaction, and shows in the index once it is on the disk. Keeps
each name's history at its length, and knows which normal files are still needed. Knows no rules:
what may be registered or rolled back is the store's business. Used by one thread at a time.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path

import msgspec

from loraplex.adapters.configured import Reconfigured
from loraplex.adapters.database import IN_MEMORY, AdapterDatabase, Alias
from loraplex.adapters.normal_files import Collected, NormalFiles
from loraplex.adapters.registry import Registry
from loraplex.adapters.state_lock import StateLock
from loraplex.adapters.version import AdapterVersion, Owner

DATABASE_NAME = "adapters.sqlite3"
MAX_HISTORY = 10
"""Versions kept of a name, the present one among them; pinned ones beyond these."""


class Journal:
    """`names` is for reading."""

    def __init__(
        self, state_dir: Path | None, unix_seconds: Callable[[], float], *, is_persistent: bool
    ) -> None:
        """Without a state directory there are no files; if not persistent, all else is in memory.

        Raises ConfigError if another process has the database open, or if it cannot be read.
        """
        self.names = Registry()
        self._unix_seconds = unix_seconds
        self._dropped: dict[str, float] = {}
        """When a digest last left a history. A request that resolved it before may not have
        reached its engine yet."""
        self._files: NormalFiles | None = None
        self._is_persistent = is_persistent
        path: Path | str = IN_MEMORY
        with contextlib.ExitStack() as opened:
            if state_dir is not None and is_persistent:
                opened.callback(StateLock.own(state_dir).close)
                path = state_dir / DATABASE_NAME
            if state_dir is not None:
                self._files = NormalFiles(state_dir)
                opened.callback(self._files.close)
            self._database = AdapterDatabase(path)
            opened.callback(self._database.close)
            self._load()
            self._opened = opened.pop_all()

    def close(self) -> None:
        self._opened.close()

    def has_file(self, version: AdapterVersion) -> bool:
        return self._files is None or self._files.has(version.digest)

    def history(self, present: AdapterVersion) -> Sequence[AdapterVersion]:
        """The versions of its name that are kept, the newest first."""
        kept = self._database.history(present.owner, present.name)
        return [self._with_its_file(version) for version in kept]

    def write(self, version: AdapterVersion) -> None:
        """A new version, or a known one with other values: the present one of its name."""
        with self._database.transaction():
            self._database.put(version)
            dropped = self._trim(version)
        self.names.put(version)
        self._note_dropped(dropped)

    def set_pinned(self, version: AdapterVersion) -> None:
        """As the version says. What was kept by its pin alone is forgotten."""
        present = self.names.version(version.owner, version.name)
        with self._database.transaction():
            self._database.set_pinned(version)
            dropped = self._trim(version)
        if present is not None and present.number == version.number:
            self.names.put(version)
        self._note_dropped(dropped)

    def drop(self, versions: Sequence[AdapterVersion]) -> None:
        """Names with their histories and aliases."""
        with self._database.transaction():
            dropped = self._drop_rows(versions)
        for version in versions:
            self.names.drop(version)
        self._note_dropped(dropped)

    def put_alias(self, owner: Owner, alias: str, name: str) -> None:
        with self._database.transaction():
            self._database.put_alias(Alias(owner, alias, name))
        self.names.put_alias(owner, alias, name)

    def drop_alias(self, owner: Owner, alias: str) -> None:
        with self._database.transaction():
            self._database.drop_alias(owner, alias)
        self.names.drop_alias(owner, alias)

    def reconfigure(self, owner: Owner, change: Reconfigured) -> None:
        """Take away all that the change names, at once."""
        nameless = [dataclasses.replace(version, task_id=None) for version in change.task_ids]
        with self._database.transaction():
            for version in nameless:
                self._database.put(version)
            for alias in change.aliases:
                self._database.drop_alias(owner, alias)
            dropped = self._drop_rows(change.removed)
        for version in nameless:
            self.names.put(version)
        for alias in change.aliases:
            self.names.drop_alias(owner, alias)
        for version in change.removed:
            self.names.drop(version)
        self._note_dropped(dropped)

    def collect_garbage(self, in_use: Collection[str], min_age_seconds: float) -> Collected:
        """Delete the normal files that nothing refers to, or did min_age_seconds ago.

        Refused without the database: the files may be named in it.
        """
        if self._files is None:
            return Collected()
        if not self._is_persistent:
            return Collected(is_refused=True)
        oldest = self._unix_seconds() - min_age_seconds
        self._dropped = {digest: at for digest, at in self._dropped.items() if at > oldest}
        kept = self._database.digests() | set(in_use) | set(self._dropped)
        return self._files.collect(lambda digest: digest not in kept, min_age_seconds)

    def _load(self) -> None:
        versions, aliases = self._database.load()
        for version in versions:
            self.names.put(self._with_its_file(version))
        for alias in aliases:
            self.names.put_alias(alias.owner, alias.alias, alias.name)

    def _with_its_file(self, version: AdapterVersion) -> AdapterVersion:
        """As it came from the database: the state directory may have been moved since."""
        if self._files is None:
            return version
        source = msgspec.structs.replace(version.source, path=self._files.path(version.digest))
        staged = msgspec.structs.replace(version.staged, source=source)
        return dataclasses.replace(version, staged=staged)

    def _trim(self, version: AdapterVersion) -> Sequence[AdapterVersion]:
        """Cut the history of a name to its length; what was cut. Within a transaction."""
        history = self._database.history(version.owner, version.name)
        too_old = [old for old in history[MAX_HISTORY:] if not old.is_pinned]
        self._database.drop_versions(too_old)
        return too_old

    def _drop_rows(self, versions: Iterable[AdapterVersion]) -> Sequence[AdapterVersion]:
        """Forget names in the database; the histories that they had. Within a transaction."""
        dropped: list[AdapterVersion] = []
        for version in versions:
            dropped += self._database.history(version.owner, version.name)
            self._database.drop(version)
        return dropped

    def _note_dropped(self, versions: Iterable[AdapterVersion]) -> None:
        now = self._unix_seconds()
        self._dropped.update((version.digest, now) for version in versions)
