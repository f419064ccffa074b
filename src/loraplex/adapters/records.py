"""The records of the adapter store: the index in memory and the database, which always agree.

Each change is one transaction, and is visible in the index once it is on the disk. The records
limit each name's history to its maximum length and know which canonical adapter files are still
needed. They have no rules: the store decides what may be registered or rolled back. One thread
uses them at a time.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from loraplex.adapters.canonical_files import CanonicalFiles, Collected
from loraplex.adapters.database import IN_MEMORY, AdapterDatabase, Alias
from loraplex.adapters.index import AdapterIndex
from loraplex.adapters.state_lock import StateLock
from loraplex.adapters.version import AdapterVersion, Owner, VersionOrigin

DATABASE_NAME = "adapters.sqlite3"
MAX_HISTORY = 10
"""Maximum number of kept versions of a name, including the present one; pinned ones come on top."""


@dataclasses.dataclass(frozen=True, slots=True)
class Reconfigured:
    """Changes that free the configured names and task ids."""

    removed: tuple[AdapterVersion, ...]
    """Adapters that only an earlier configuration had named."""
    aliases: tuple[str, ...]
    """Aliases whose name the configuration uses."""
    task_ids: tuple[AdapterVersion, ...]
    """Adapters that lost their task id, as they were before."""


class StoreRecords:
    """Records of the store. `names` must only be read."""

    def __init__(
        self, state_dir: Path | None, unix_seconds: Callable[[], float], *, is_persistent: bool
    ) -> None:
        """Open the records; without a state directory no files, if not persistent all in memory.

        Raises ConfigError if another process has the database open, or if it cannot be read.
        """
        self.names = AdapterIndex()
        self._unix_seconds = unix_seconds
        self._dropped: dict[str, float] = {}
        """Time at which a digest last left a history. A request that resolved it earlier may not
        have reached its engine yet."""
        self._files: CanonicalFiles | None = None
        self._is_persistent = is_persistent
        path: Path | str = IN_MEMORY
        with contextlib.ExitStack() as opened:
            if state_dir is not None and is_persistent:
                opened.callback(StateLock.own(state_dir).close)
                path = state_dir / DATABASE_NAME
            if state_dir is not None:
                self._files = CanonicalFiles(state_dir)
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
        """Return the kept versions of a name, newest first."""
        kept = self._database.history(present.owner, present.name)
        return [self._with_its_file(version) for version in kept]

    def write(self, version: AdapterVersion, aliases: Collection[str] | None = None) -> None:
        """Write a new version, or a known one with other values, as the present one of its name.

        Later versions are forgotten. aliases: the name then has exactly those that are free.
        """
        owner, name = version.owner, version.name
        replaced = self.names.version(owner, name)
        free, stale = self._aliases(version, aliases)
        with self._database.transaction():
            for alias in stale:
                self._database.drop_alias(owner, alias)
            self._database.put(version)
            dropped = [*self._drop_later(version), *self._trim(version)]
            for alias in free:
                self._database.put_alias(Alias(owner, alias, name))
        for alias in stale:
            self.names.drop_alias(owner, alias)
        self.names.put(version)
        for alias in free:
            self.names.put_alias(owner, alias, name)
        if replaced is not None and replaced.number == version.number:
            dropped.append(replaced)
        self._note_dropped(dropped)

    def set_pinned(self, version: AdapterVersion) -> None:
        """Write the version's pin. A version that only its pin kept is forgotten."""
        present = self.names.version(version.owner, version.name)
        with self._database.transaction():
            self._database.set_pinned(version)
            dropped = self._trim(version)
        if present is not None and present.number == version.number:
            self.names.put(version)
        self._note_dropped(dropped)

    def drop(self, versions: Sequence[AdapterVersion]) -> None:
        """Drop names with their histories and aliases."""
        with self._database.removal():
            dropped = self._drop_rows(versions)
        for version in versions:
            self.names.drop(version)
        self._note_dropped(dropped)

    def put_alias(self, owner: Owner, alias: str, name: str) -> None:
        with self._database.transaction():
            self._database.put_alias(Alias(owner, alias, name))
        self.names.put_alias(owner, alias, name)

    def drop_alias(self, owner: Owner, alias: str) -> None:
        with self._database.removal():
            self._database.drop_alias(owner, alias)
        self.names.drop_alias(owner, alias)

    def reconfigure(self, owner: Owner, change: Reconfigured) -> None:
        """Apply a change of the configuration in one transaction."""
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
        """Delete canonical adapter files without a reference in the last min_age_seconds.

        Refused without the database, which may refer to the files.
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
        """Set the path of a version's file: the state directory may have moved."""
        if self._files is None:
            return version
        source = msgspec.structs.replace(version.source, path=self._files.path(version.digest))
        staged = msgspec.structs.replace(version.staged, source=source)
        return dataclasses.replace(version, staged=staged)

    def _aliases(
        self, version: AdapterVersion, aliases: Collection[str] | None
    ) -> tuple[list[str], list[str]]:
        """Return those of a name's wanted aliases that are free, and those to drop."""
        if aliases is None:
            return [], []
        owner, name = version.owner, version.name
        free = [a for a in aliases if a != name and self.names.version(owner, a) is None]
        present = self.names.aliases(owner).items()
        return free, [a for a, of in present if a == name or (of == name and a not in free)]

    def _drop_later(self, version: AdapterVersion) -> Sequence[AdapterVersion]:
        """Forget the versions of a greater number. Call within a transaction."""
        history = self._database.history(version.owner, version.name)
        later = [old for old in history if old.number > version.number]
        self._database.drop_versions(later)
        return later

    def _trim(self, version: AdapterVersion) -> Sequence[AdapterVersion]:
        """Limit the history of a name; return what was cut. Call within a transaction."""
        history = self._database.history(version.owner, version.name)
        too_old = [old for old in history[MAX_HISTORY:] if not old.is_pinned]
        self._database.drop_versions(too_old)
        return too_old

    def _drop_rows(self, versions: Iterable[AdapterVersion]) -> Sequence[AdapterVersion]:
        """Delete names in the database; return their histories. Call within a transaction."""
        dropped: list[AdapterVersion] = []
        for version in versions:
            dropped += self._database.history(version.owner, version.name)
            self._database.drop(version)
        return dropped

    def _note_dropped(self, versions: Iterable[AdapterVersion]) -> None:
        now = self._unix_seconds()
        self._dropped.update((version.digest, now) for version in versions)


def reconfigure(
    versions: Iterable[AdapterVersion],
    aliases: Iterable[str],
    task_ids: Mapping[str, int | None],
) -> Reconfigured:
    """Return what a configuration (name -> task id) takes from one owner's versions and aliases."""
    names_by_task = {task_id: name for name, task_id in task_ids.items()}
    staying: list[AdapterVersion] = []
    removed: list[AdapterVersion] = []
    for version in versions:
        is_stale = version.origin is VersionOrigin.CONFIGURED and version.name not in task_ids
        (removed if is_stale else staying).append(version)
    losing = [
        version
        for version in staying
        if version.task_id is not None
        and (
            names_by_task.get(version.task_id, version.name) != version.name
            or task_ids.get(version.name, version.task_id) != version.task_id
        )
    ]
    wanted = (alias for alias in aliases if alias in task_ids)
    return Reconfigured(tuple(removed), tuple(wanted), tuple(losing))
