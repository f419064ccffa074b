"""Store of registered adapters on the disk: names, task ids and versions of every tenant.

A name or a task id means a version, a version has a digest; older versions are kept. This module
has the rules; database.py keeps the results. It opens no user's file and holds no tensor.

Lookups (resolve, find, list, aliases, check_free) never touch the disk. Each change is
on the disk before it is visible: one transaction, one fsync. Call changes, open, history, missing
and collect_garbage in a thread, not on an event loop.
"""

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from loraplex.adapters.database import DATABASE_NAME, IN_MEMORY, AdapterDatabase
from loraplex.adapters.staged import StagedAdapter
from loraplex.adapters.state_files import CanonicalFiles, Collected, StateLock
from loraplex.adapters.version import (
    MAX_NAME_LENGTH,
    AdapterVersion,
    Owner,
    VersionOrigin,
    check_name,
    check_task_id,
)
from loraplex.core.adapter import AdapterRef, ByName
from loraplex.core.errors import AdapterExistsError, AdapterLoadError, AdapterNotFoundError

__all__ = [
    "MAX_HISTORY",
    "MAX_NAME_LENGTH",
    "AdapterStore",
    "AdapterVersion",
    "Registration",
    "VersionOrigin",
    "numbered",
]

MAX_HISTORY = 10
"""Maximum number of kept versions of a name, including the present one; pinned ones come on top."""
GARBAGE_AGE_SECONDS = 600.0
_OF_LOAD = ("task_id", "staged", "path", "origin")
"""What may differ between loads of one version's bytes."""


@dataclasses.dataclass(frozen=True, slots=True)
class Registration:
    """Result of a registration."""

    version: AdapterVersion
    is_unchanged: bool
    """Whether the name had the same bytes before."""


@dataclasses.dataclass(frozen=True, slots=True)
class Reconfigured:
    """Changes that free the configured names and task ids."""

    removed: tuple[AdapterVersion, ...]
    """Adapters that only an earlier configuration had named."""
    aliases: tuple[str, ...]
    """Aliases whose name the configuration uses."""
    task_ids: tuple[AdapterVersion, ...]
    """Adapters that lost their task id, as they were before."""


class AdapterStore:
    """Registered adapters. Invariant: index and database agree whenever no change runs.

    Every method may be called from any thread; changes wait for one another.
    """

    def __init__(
        self,
        unix_seconds: Callable[[], float] = time.time,
        *,
        state_dir: Path | None = None,
        is_persistent: bool = False,
    ) -> None:
        """Open a store in memory, without files if there is no state directory. See also open()."""
        self._unix_seconds = unix_seconds
        self._changing = threading.Lock()
        self._is_persistent = is_persistent
        self._dropped: dict[str, float] = {}
        """Time at which a digest last left a history. A request that resolved it earlier may not
        have reached its engine yet."""
        self._files: CanonicalFiles | None = None
        path: Path | str = IN_MEMORY
        with contextlib.ExitStack() as opened:
            if state_dir is not None and is_persistent:
                opened.callback(StateLock.own(state_dir).close)
                path = state_dir / DATABASE_NAME
            if state_dir is not None:
                self._files = CanonicalFiles(state_dir)
                opened.callback(self._files.close)
            file_path = None if self._files is None else self._files.path
            self._database = AdapterDatabase(path, file_path)
            opened.callback(self._database.close)
            self._opened = opened.pop_all()
        self._names = self._database.names
        self.find = self._names.find
        """Return the present version, if any, even if its canonical adapter file is gone."""
        self.kept = self._names.kept
        """Return a version that was recalled, and is still in the history."""
        self.missing_digests: frozenset[str] = frozenset()
        """Digests whose canonical adapter file was missing at the last check."""
        self._look_for_files()

    @classmethod
    def open(cls, state_dir: Path, unix_seconds: Callable[[], float] = time.time) -> "AdapterStore":
        """Open the store of a state directory, or create it. Blocks.

        Raises ConfigError if another process has it open, or if it cannot be read.
        """
        return cls(unix_seconds, state_dir=state_dir, is_persistent=True)

    @classmethod
    def in_memory(cls, state_dir: Path) -> "AdapterStore":
        """Open an empty store in memory, which keeps the directory's files from being collected.

        Any number may be open, in addition to one that owns the database. Raises ConfigError if
        the folder is unusable.
        """
        return cls(state_dir=state_dir)

    def close(self) -> None:
        """Release the state directory. Lookups still work; changes fail."""
        with self._changing:
            self._opened.close()

    def check_free(
        self, model: str, tenant: str, name: str, task_id: int | None = None, *, replace: bool
    ) -> None:
        """Check that add() would accept the name and the task id.

        Raises InvalidParameterError for a bad one, AdapterExistsError for one that is taken (by
        another name's adapter even if replace is set).
        """
        check_name(name)
        check_task_id(task_id)
        owner = (model, tenant)
        existing = self._names.version(owner, name)
        if existing is not None and not replace:
            raise AdapterExistsError(
                f"adapter {name!r} already exists (digest {existing.digest[:12]}); "
                "remove it first, or replace it",
                param="name",
            )
        meant = self._names.meaning(owner, name)
        if meant is not None:
            raise AdapterExistsError(
                f"{name!r} is an alias of adapter {meant!r}; load under that name, or remove the "
                "alias first",
                param="name",
            )
        self._check_task_id_free(owner, name, task_id)

    def register(
        self,
        model: str,
        tenant: str,
        name: str,
        staged: StagedAdapter,
        *,
        path: str,
        task_id: int | None = None,
        replace: bool = False,
        origin: VersionOrigin = VersionOrigin.API,
    ) -> Registration:
        """Register a staged adapter. Raises as check_free, and then changes nothing.

        Other bytes under a known name are a new version; the same bytes are the same version, with
        the new path, report and origin. Without a task id it keeps the previous one. Raises
        AdapterLoadError if the canonical adapter file is gone.
        """
        with self._changing:
            self.check_free(model, tenant, name, task_id, replace=replace)
            present = self._names.version((model, tenant), name)
            kept_task_id = None if present is None else present.task_id
            version = AdapterVersion(
                model=model,
                tenant=tenant,
                name=name,
                task_id=kept_task_id if task_id is None else task_id,
                number=1 if present is None else present.number + 1,
                # The duration of this load must not make a new version.
                staged=msgspec.structs.replace(staged, seconds={}, was_known=False),
                path=path,
                created=int(self._unix_seconds()),
                origin=origin,
            )
            is_unchanged = present is not None and present.digest == version.digest
            if present is not None and is_unchanged:
                kept = {name: getattr(version, name) for name in _OF_LOAD}
                version = dataclasses.replace(present, **kept)
            if version != present or version.digest in self.missing_digests:
                self._write(version)
            return Registration(version, is_unchanged)

    def declare(self, version: AdapterVersion, aliases: Collection[str]) -> AdapterVersion | None:
        """Bind a declared version of any number, with its aliases; return the one before.

        Raises AdapterExistsError for another adapter's task id, AdapterLoadError without its file.
        """
        with self._changing:
            self._check_task_id_free(version.owner, version.name, version.task_id)
            present = self._names.version(version.owner, version.name)
            self._write(version, aliases)
            return present

    def remove(self, ref: AdapterRef) -> AdapterVersion:
        """Forget a name with its history, pins and aliases; return its present version.

        With the name of an alias only the alias is forgotten. Raises AdapterNotFoundError.
        """
        with self._changing:
            version = self._names.resolve(ref)
            with self._change(is_removal=True):
                if isinstance(ref.key, ByName) and ref.key.name != version.name:
                    self._database.drop_alias(version.owner, ref.key.name)
                else:
                    self._database.drop(version)
            return version

    def resolve(self, ref: AdapterRef) -> AdapterVersion:
        """Return the present version.

        Raises AdapterNotFoundError, which lists known names, or AdapterLoadError if its canonical
        adapter file is gone.
        """
        version = self._names.resolve(ref)
        if version.digest in self.missing_digests:
            raise _file_is_gone(version)
        return version

    def list(self, tenant: str, model: str | None = None) -> list[AdapterVersion]:
        """Return a tenant's adapters by model and name, including those whose file is gone."""
        if model is not None:
            versions = self._names.versions((model, tenant))
        else:
            versions = [one for one in self._names.versions() if one.tenant == tenant]
        return sorted(versions, key=lambda version: (version.model, version.name))

    def present(self, model: str) -> Sequence[AdapterVersion]:
        """Return the present version of each name of a model, for all tenants."""
        return [version for version in self._names.versions() if version.model == model]

    def rollback(
        self,
        ref: AdapterRef,
        number: int | None = None,
        check: Callable[[AdapterVersion], object] | None = None,
    ) -> AdapterVersion:
        """Make an older version the present one again, as a new version of the same bytes.

        Without a number: the version before the present one; a second rollback restores the one
        before that. Raises AdapterNotFoundError if there is none, AdapterLoadError if its canonical
        adapter file is gone, and what `check` raises for the older version.
        """
        with self._changing:
            present = self._names.resolve(ref)
            if number is None:
                target = self._version_before(present)
            else:
                target = self._numbered(present, number)
            if target.digest == present.digest:
                return present
            if check is not None:
                check(target)
            version = dataclasses.replace(
                target,
                number=present.number + 1,
                created=int(self._unix_seconds()),
                origin=VersionOrigin.API,
                restored=target.restored or target.number,
                is_pinned=False,
            )
            self._write(version)
            return version

    def history(self, ref: AdapterRef) -> Sequence[AdapterVersion]:
        """Return the kept versions of a name, the present one first."""
        with self._changing:
            return self._database.history(self._names.resolve(ref))

    def recall(
        self, owner: Owner, digest: str, check: Callable[[AdapterVersion], object]
    ) -> AdapterVersion | None:
        """Return a version in a history by its digest, and let `kept` find it; None: there is none.

        Raises what `check` raises for it, or AdapterLoadError if its canonical adapter file is
        gone.
        """
        with self._changing:
            version = self._database.of_digest(owner, digest)
            if version is None:
                return None
            if not self._has_file(version):
                raise _file_is_gone(version)
            check(version)
            self._names.recall(version)
            return version

    def is_kept_only(self, version: AdapterVersion) -> bool:
        """Whether a version is in a history without being the present one of its name."""
        present = self._names.version(version.owner, version.name)
        return present is None or present.digest != version.digest

    def pin(self, ref: AdapterRef, number: int | None = None) -> AdapterVersion:
        """Keep a version (the present one without a number) in the history, and its file.

        Raises AdapterNotFoundError for a number that is not in the history. Removing the name
        also removes the pin.
        """
        return self._set_pinned(ref, number, True)

    def unpin(self, ref: AdapterRef, number: int | None = None) -> AdapterVersion:
        """Undo pin(). A version beyond the history's length is forgotten."""
        return self._set_pinned(ref, number, False)

    def alias(self, ref: AdapterRef, alias: str, *, replace: bool = False) -> AdapterVersion:
        """Add another name for an adapter, which follows its present version.

        With replace, an alias of another adapter becomes one of this adapter. Raises
        AdapterExistsError for a name that is taken; an adapter's own name always is.
        """
        check_name(alias)
        with self._changing:
            version = self._names.resolve(ref)
            owner = version.owner
            meant = self._names.meaning(owner, alias)
            if meant == version.name:
                return version
            if self._names.version(owner, alias) is not None:
                raise AdapterExistsError(f"{alias!r} is the name of an adapter", param="alias")
            if meant is not None and not replace:
                raise AdapterExistsError(
                    f"{alias!r} already is an alias of adapter {meant!r}; remove it first, or "
                    "replace it",
                    param="alias",
                )
            with self._change():
                self._database.put_alias(owner, alias, version.name)
            return version

    def aliases(self, tenant: str, model: str) -> Mapping[str, str]:
        """Return the adapter's name by alias."""
        return self._names.aliases((model, tenant))

    def missing(self) -> Sequence[AdapterVersion]:
        """Check the file of every present version; return the versions without one, of all tenants.

        resolve() refuses these until they are staged and registered again.
        """
        with self._changing:
            return self._look_for_files()

    def collect_garbage(
        self, in_use: Collection[str], min_age_seconds: float = GARBAGE_AGE_SECONDS
    ) -> Collected:
        """Delete the canonical adapter files that no version in a history refers to.

        in_use: digests that engines still know. A file stays if it was written, or its version
        forgotten, within min_age_seconds: a name or an engine may be about to use it.
        """
        with self._changing:
            if self._files is None:
                return Collected()
            if not self._is_persistent:  # another process's database may refer to the files
                return Collected(is_refused=True)
            oldest = self._unix_seconds() - min_age_seconds
            self._dropped = {digest: at for digest, at in self._dropped.items() if at > oldest}
            kept = self._database.digests() | set(in_use) | set(self._dropped)
            return self._files.collect(lambda digest: digest not in kept, min_age_seconds)

    def apply_configuration(
        self, model: str, tenant: str, task_ids: Mapping[str, int | None]
    ) -> Reconfigured:
        """Free the names and task ids that a configuration uses.

        Call it at the start, before they are registered with origin CONFIGURED: a configured name
        and its task id always win. Forgets adapters that only an earlier configuration named.
        """
        owner = (model, tenant)
        with self._changing:
            versions, aliases = self._names.versions(owner), self._names.aliases(owner)
            change = _reconfigured(versions, aliases, task_ids)
            with self._change():
                for version in change.task_ids:
                    self._database.put(dataclasses.replace(version, task_id=None))
                for alias in change.aliases:
                    self._database.drop_alias(owner, alias)
                for version in change.removed:
                    self._database.drop(version)
            return change

    def _check_task_id_free(self, owner: Owner, name: str, task_id: int | None) -> None:
        holder = self._names.holder(owner, task_id)
        if holder not in (None, name):
            raise AdapterExistsError(
                f"LoRA task {task_id} already is adapter {holder!r}", param="task_id"
            )

    @contextlib.contextmanager
    def _change(self, *, is_removal: bool = False) -> Iterator[None]:
        """Run a change as one transaction, and note which digests left a history by it."""
        begun = self._database.removal() if is_removal else self._database.transaction()
        with begun as dropped:
            yield
        self._dropped.update(dict.fromkeys(dropped, self._unix_seconds()))

    def _look_for_files(self) -> Sequence[AdapterVersion]:
        missing = [version for version in self._names.versions() if not self._has_file(version)]
        self.missing_digests = frozenset(version.digest for version in missing)
        return missing

    def _has_file(self, version: AdapterVersion) -> bool:
        return self._files is None or self._files.has(version.digest)

    def _write(self, version: AdapterVersion, aliases: Collection[str] | None = None) -> None:
        """Write a version as the present one of its name, and forget later ones.

        aliases: the name then has exactly those that are free. Raises AdapterLoadError without its
        file.
        """
        if not self._has_file(version):
            raise _file_is_gone(version)
        owner, name = version.owner, version.name
        free: list[str] = []
        with self._change():
            if aliases is not None:
                free = [a for a in aliases if a != name and self._names.version(owner, a) is None]
                for alias, of in self._names.aliases(owner).items():
                    if alias == name or (of == name and alias not in free):
                        self._database.drop_alias(owner, alias)
            self._database.put(version)
            self._database.trim(version, MAX_HISTORY)
            for alias in free:
                self._database.put_alias(owner, alias, name)
        self.missing_digests -= {version.digest}

    def _version_before(self, present: AdapterVersion) -> AdapterVersion:
        """Return the previous version; of a restored version, the one before its original."""
        below = present.restored or present.number
        for version in self._database.history(present):
            if version.number < below and version.digest != present.digest:
                return version
        raise AdapterNotFoundError(
            f"adapter {present.name!r} has no version before {below} in its history"
        )

    def _numbered(self, present: AdapterVersion, number: int) -> AdapterVersion:
        return numbered(self._database.history(present), number)

    def _set_pinned(self, ref: AdapterRef, number: int | None, is_pinned: bool) -> AdapterVersion:
        with self._changing:
            present = self._names.resolve(ref)
            version = present if number is None else self._numbered(present, number)
            pinned = dataclasses.replace(version, is_pinned=is_pinned)
            with self._change():
                self._database.set_pinned(pinned)
                self._database.trim(present, MAX_HISTORY)
            self._names.forget_kept(present)
            return pinned


def numbered(history: Sequence[AdapterVersion], number: int) -> AdapterVersion:
    """Return the version of a history that has a number. Raises AdapterNotFoundError."""
    for version in history:
        if version.number == number:
            return version
    kept = ", ".join(str(version.number) for version in history)
    raise AdapterNotFoundError(
        f"adapter {history[0].name!r} has no version {number}; kept: {kept}", param="version"
    )


def _reconfigured(
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


def _file_is_gone(version: AdapterVersion) -> AdapterLoadError:
    return AdapterLoadError(
        f"the canonical adapter file of adapter {version.name!r} (version {version.number}, digest "
        f"{version.digest[:12]}) is gone from the state directory; load it again from "
        f"{version.shown_path or 'its source'}"
    )
