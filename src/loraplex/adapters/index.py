"""What every name, alias, task id and digest means now: the store's index in memory.

Holds present versions only and knows no file and no database. Whoever looks something up sees the
state before a change or after it; a lookup never waits for a disk.
"""

import dataclasses
import difflib
import threading
from collections.abc import Mapping

from loraplex.adapters.version import AdapterVersion, Owner
from loraplex.core.adapter import AdapterKey, AdapterRef, ByDigest, ByName, ByTaskId
from loraplex.core.errors import AdapterNotFoundError

_MOST_NAMES_TOLD = 10
_MOST_NAMES_COMPARED = 500
"""With the wanted one, to find the nearest: ten thousand would take an event loop 0.1 s."""


@dataclasses.dataclass(slots=True)
class _Names:
    """Of one owner."""

    versions: dict[str, AdapterVersion] = dataclasses.field(default_factory=dict)
    aliases: dict[str, str] = dataclasses.field(default_factory=dict)
    names_by_task: dict[int, str] = dataclasses.field(default_factory=dict)
    names_by_digest: dict[str, set[str]] = dataclasses.field(default_factory=dict)


class AdapterIndex:
    """Invariant: a task id belongs to one name of its owner, and no alias is also a name.

    Every method may be called from any thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owners: dict[Owner, _Names] = {}

    def resolve(self, ref: AdapterRef) -> AdapterVersion:
        """The present version. Raises AdapterNotFoundError, which names what there is."""
        found = self.find(ref)
        if found is None:
            with self._lock:
                names = self._names((ref.model, ref.tenant))
                known = {name: one.task_id for name, one in names.versions.items()}
                known |= dict.fromkeys(names.aliases)
            raise not_found(ref.key, ref.model, known)
        return found

    def find(self, ref: AdapterRef) -> AdapterVersion | None:
        """The present version, if there is one."""
        with self._lock:
            names = self._names((ref.model, ref.tenant))
            match ref.key:
                case ByName(name):
                    return names.versions.get(names.aliases.get(name, name))
                case ByTaskId(task_id):
                    return names.versions.get(names.names_by_task.get(task_id, ""))
                case ByDigest(digest):
                    # Of several names for one content always the same answers.
                    return names.versions.get(min(names.names_by_digest.get(digest, {""})))

    def version(self, owner: Owner, name: str) -> AdapterVersion | None:
        """By its own name, not by an alias."""
        with self._lock:
            return self._names(owner).versions.get(name)

    def holder(self, owner: Owner, task_id: int | None) -> AdapterVersion | None:
        """Whose task id it is."""
        with self._lock:
            names = self._names(owner)
            name = None if task_id is None else names.names_by_task.get(task_id)
            return None if name is None else names.versions[name]

    def aliases(self, owner: Owner) -> Mapping[str, str]:
        """A copy: alias -> name."""
        with self._lock:
            return dict(self._names(owner).aliases)

    def versions(self, owner: Owner | None = None) -> list[AdapterVersion]:
        """The present ones, of one owner or of all."""
        with self._lock:
            owners = self._owners.values() if owner is None else [self._names(owner)]
            return [version for names in owners for version in names.versions.values()]

    def put(self, version: AdapterVersion) -> None:
        """In place of the version that the name had, if it had one."""
        with self._lock:
            names = self._owners.setdefault(version.owner, _Names())
            old = names.versions.get(version.name)
            if old is not None:
                _forget_keys(names, old)
            names.versions[version.name] = version
            names.names_by_digest.setdefault(version.digest, set()).add(version.name)
            if version.task_id is not None:
                names.names_by_task[version.task_id] = version.name

    def drop(self, version: AdapterVersion) -> None:
        """The name, and its aliases with it."""
        with self._lock:
            names = self._owners[version.owner]
            _forget_keys(names, names.versions.pop(version.name))
            for alias in [a for a, name in names.aliases.items() if name == version.name]:
                del names.aliases[alias]

    def put_alias(self, owner: Owner, alias: str, name: str) -> None:
        with self._lock:
            self._owners[owner].aliases[alias] = name

    def drop_alias(self, owner: Owner, alias: str) -> None:
        with self._lock:
            del self._owners[owner].aliases[alias]

    def _names(self, owner: Owner) -> _Names:
        return self._owners.get(owner) or _Names()


def _forget_keys(names: _Names, version: AdapterVersion) -> None:
    same = names.names_by_digest[version.digest]
    same.remove(version.name)
    if not same:
        del names.names_by_digest[version.digest]
    if version.task_id is not None:
        del names.names_by_task[version.task_id]


def not_found(key: AdapterKey, model: str, known: Mapping[str, int | None]) -> AdapterNotFoundError:
    """For whom it concerns, who knows of these names (each with its task id, if it has one)."""
    return AdapterNotFoundError(_not_found(key, model, known), param="adapter")


def _not_found(key: AdapterKey, model: str, known: Mapping[str, int | None]) -> str:
    """Clients of TensorRT-LLM look for the sentence about a task id: it must stay as it is."""
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
    told = ", ".join(names[:_MOST_NAMES_TOLD])
    more = f" and {len(names) - _MOST_NAMES_TOLD} more" if len(names) > _MOST_NAMES_TOLD else ""
    return f"{missing}; known adapters: {told}{more}"


def _with_task_ids(known: Mapping[str, int | None]) -> list[str]:
    """Those that have one first, in the order of their ids."""
    ids = {name: task_id for name, task_id in known.items() if task_id is not None}
    numbered = [f"{name!r} (task {ids[name]})" for name in sorted(ids, key=ids.__getitem__)]
    return numbered + [repr(name) for name in known if name not in ids]


def _nearest_first(wanted: str, names: list[str]) -> list[str]:
    compared = sorted(names, key=lambda name: name[:1] != wanted[:1])[:_MOST_NAMES_COMPARED]
    near = difflib.get_close_matches(wanted, compared, n=_MOST_NAMES_TOLD)
    return near + sorted(name for name in names if name not in near)
