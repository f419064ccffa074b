"""Index of the adapter store in memory: present versions by name, alias, task id and digest, and
the kept ones that requests named lately.

It knows no file and no database. A lookup returns the state before or after a change, and never
waits for a disk.
"""

import dataclasses
import difflib
import threading
from collections import OrderedDict, defaultdict
from collections.abc import Mapping

from loraplex.adapters.version import AdapterVersion, Owner
from loraplex.core.adapter import AdapterKey, AdapterRef, ByDigest, ByName, ByTaskId
from loraplex.core.errors import AdapterNotFoundError

_MAX_NAMES_SHOWN = 10
_MAX_NAMES_COMPARED = 500
"""Maximum to compare with an unknown name: ten thousand would block an event loop for 0.1 s."""
MAX_RECALLED = 64
"""Maximum number of kept versions of one owner that stay in the index."""


@dataclasses.dataclass(slots=True)
class _Names:
    """Names of one owner."""

    versions: dict[str, AdapterVersion] = dataclasses.field(default_factory=dict)
    aliases: dict[str, str] = dataclasses.field(default_factory=dict)
    names_by_task: dict[int, str] = dataclasses.field(default_factory=dict)
    names_by_digest: dict[str, set[str]] = dataclasses.field(default_factory=dict)
    recalled: OrderedDict[str, AdapterVersion] = dataclasses.field(default_factory=OrderedDict)
    """Kept versions by digest, the last recalled one last."""


class AdapterIndex:
    """Index of present versions. Invariant: a task id belongs to one name of its
    owner, and no alias is also a name.

    Every method may be called from any thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owners: defaultdict[Owner, _Names] = defaultdict(_Names)

    def resolve(self, ref: AdapterRef) -> AdapterVersion:
        """Return the present version. Raises AdapterNotFoundError, which lists known names."""
        found = self.find(ref)
        if found is None:
            with self._lock:
                names = self._owners[ref.model, ref.tenant]
                known = {name: one.task_id for name, one in names.versions.items()}
                known |= dict.fromkeys(names.aliases)
            raise not_found(ref.key, ref.model, known)
        return found

    def find(self, ref: AdapterRef) -> AdapterVersion | None:
        """Return the present version, if any."""
        with self._lock:
            names = self._owners[ref.model, ref.tenant]
            match ref.key:
                case ByName(name):
                    return names.versions.get(names.aliases.get(name, name))
                case ByTaskId(task_id):
                    return names.versions.get(names.names_by_task.get(task_id, ""))
                case ByDigest(digest):
                    # Of several names for one content always return the same one.
                    return names.versions.get(min(names.names_by_digest.get(digest, {""})))

    def kept(self, owner: Owner, digest: str) -> AdapterVersion | None:
        """Return a version that is not the present one of its name, if it was recalled."""
        with self._lock:
            return self._owners[owner].recalled.get(digest)

    def recall(self, version: AdapterVersion) -> None:
        """Add a kept version. It leaves again with the next change of its name's history."""
        with self._lock:
            recalled = self._owners[version.owner].recalled
            recalled[version.digest] = version
            recalled.move_to_end(version.digest)
            if len(recalled) > MAX_RECALLED:
                recalled.popitem(last=False)

    def forget_kept(self, version: AdapterVersion) -> None:
        """Remove the recalled versions of a name."""
        with self._lock:
            _forget_recalled(self._owners[version.owner], version.name)

    def version(self, owner: Owner, name: str) -> AdapterVersion | None:
        """Return a version by its own name, not by an alias."""
        with self._lock:
            return self._owners[owner].versions.get(name)

    def holder(self, owner: Owner, task_id: int | None) -> str | None:
        """Return the name that has a task id."""
        with self._lock:
            return None if task_id is None else self._owners[owner].names_by_task.get(task_id)

    def meaning(self, owner: Owner, alias: str) -> str | None:
        """Return the name that an alias means."""
        with self._lock:
            return self._owners[owner].aliases.get(alias)

    def aliases(self, owner: Owner) -> Mapping[str, str]:
        """Return a copy of the aliases: alias -> name."""
        with self._lock:
            return dict(self._owners[owner].aliases)

    def versions(self, owner: Owner | None = None) -> list[AdapterVersion]:
        """Return the present versions of one owner, or of all."""
        with self._lock:
            owners = self._owners.values() if owner is None else [self._owners[owner]]
            return [version for names in owners for version in names.versions.values()]

    def put(self, version: AdapterVersion) -> None:
        """Set the present version of its name."""
        with self._lock:
            names = self._owners[version.owner]
            if names.recalled:
                _forget_recalled(names, version.name)
            old = names.versions.get(version.name)
            if old is not None:
                _forget_keys(names, old)
            names.versions[version.name] = version
            names.names_by_digest.setdefault(version.digest, set()).add(version.name)
            if version.task_id is not None:
                names.names_by_task[version.task_id] = version.name

    def drop(self, version: AdapterVersion) -> None:
        """Remove a name and its aliases."""
        with self._lock:
            names = self._owners[version.owner]
            _forget_recalled(names, version.name)
            _forget_keys(names, names.versions.pop(version.name))
            for alias in [a for a, name in names.aliases.items() if name == version.name]:
                del names.aliases[alias]

    def put_alias(self, owner: Owner, alias: str, name: str) -> None:
        with self._lock:
            self._owners[owner].aliases[alias] = name

    def drop_alias(self, owner: Owner, alias: str) -> None:
        with self._lock:
            del self._owners[owner].aliases[alias]


def _forget_recalled(names: _Names, name: str) -> None:
    for digest in [d for d, kept in names.recalled.items() if kept.name == name]:
        del names.recalled[digest]


def _forget_keys(names: _Names, version: AdapterVersion) -> None:
    same = names.names_by_digest[version.digest]
    same.remove(version.name)
    if not same:
        del names.names_by_digest[version.digest]
    if version.task_id is not None:
        del names.names_by_task[version.task_id]


def not_found(key: AdapterKey, model: str, known: Mapping[str, int | None]) -> AdapterNotFoundError:
    """Return the error for a tenant which sees `known`: names with their task ids, if any."""
    return AdapterNotFoundError(_not_found(key, model, known), param="adapter")


def _not_found(key: AdapterKey, model: str, known: Mapping[str, int | None]) -> str:
    """Return the message. TensorRT-LLM's clients search for the sentence about a task id."""
    names = [repr(name) for name in known]
    match key:
        case ByName(name):
            missing = f"adapter {name!r} not found for model {model!r}"
            names = [repr(near) for near in _nearest_first(name, list(known))]
        case ByTaskId(task_id):
            missing = (
                f"LoRA task {task_id} not found in cache. "
                "Please send LoRA weights with request, or register an adapter with this task id"
            )
            names = _with_task_ids(known)
        case ByDigest(digest):
            missing = f"no adapter of model {model!r} has digest {digest}"
    if not names:
        return f"{missing}; no adapter is registered"
    listed = ", ".join(names[:_MAX_NAMES_SHOWN])
    more = f" and {len(names) - _MAX_NAMES_SHOWN} more" if len(names) > _MAX_NAMES_SHOWN else ""
    return f"{missing}; known adapters: {listed}{more}"


def _with_task_ids(known: Mapping[str, int | None]) -> list[str]:
    """Return quoted names, those with task ids first, ordered by id."""
    ids = {name: task_id for name, task_id in known.items() if task_id is not None}
    numbered = [f"{name!r} (task {ids[name]})" for name in sorted(ids, key=ids.__getitem__)]
    return numbered + [repr(name) for name in known if name not in ids]


def _nearest_first(wanted: str, names: list[str]) -> list[str]:
    compared = sorted(names, key=lambda name: name[:1] != wanted[:1])[:_MAX_NAMES_COMPARED]
    near = difflib.get_close_matches(wanted, compared, n=_MAX_NAMES_SHOWN)
    return near + sorted(name for name in names if name not in near)
