"""What names and task ids stand for: the registered adapters of every tenant.

A name or a task id points to a version, a version is a digest. Owns no file and no tensor, and
names never become paths. Kept in memory; every change goes through `_put` and `_drop`.
"""

import dataclasses
import difflib
import time
import unicodedata
from collections.abc import Callable

from loraplex.adapters.staged import StagedAdapter
from loraplex.core.adapter import (
    MAX_TASK_ID,
    AdapterKey,
    AdapterRef,
    AdapterSource,
    ByDigest,
    ByName,
    ByTaskId,
)
from loraplex.core.errors import (
    AdapterExistsError,
    AdapterNotFoundError,
    InvalidParameterError,
)

MAX_NAME_LENGTH = 256
_MOST_NAMES_TOLD = 10


@dataclasses.dataclass(frozen=True, slots=True)
class AdapterVersion:
    """What a name meant when it was resolved; a request keeps it to its end."""

    model: str
    tenant: str
    name: str
    task_id: int | None
    number: int
    """1 for the first version of a name; grows with every replacement."""
    staged: StagedAdapter
    path: str
    """Where it was staged from."""
    created: int
    """Unix seconds."""

    @property
    def source(self) -> AdapterSource:
        return self.staged.source

    @property
    def digest(self) -> str:
        return self.staged.source.digest

    @property
    def warnings(self) -> tuple[str, ...]:
        return self.staged.warnings

    @property
    def rank(self) -> int:
        """The largest of its ranks."""
        return max((target.rank for target in self.source.targets), default=0)


_Owner = tuple[str, str]
"""(model, tenant)"""


class AdapterStore:
    """Invariant: a task id belongs to one name of its (model, tenant). Used by one thread."""

    def __init__(self, unix_seconds: Callable[[], float] = time.time) -> None:
        self._unix_seconds = unix_seconds
        self._versions: dict[_Owner, dict[str, AdapterVersion]] = {}
        self._names_by_task: dict[_Owner, dict[int, str]] = {}

    def check_free(
        self, model: str, tenant: str, name: str, task_id: int | None = None, *, replace: bool
    ) -> None:
        """Whether add() would take the name and the task id.

        Raises InvalidParameterError for a bad one, AdapterExistsError for one that is taken (by
        another name's adapter even if replace is set).
        """
        _check_name(name)
        _check_task_id(task_id)
        owner = (model, tenant)
        existing = self._versions.get(owner, {}).get(name)
        if existing is not None and not replace:
            raise AdapterExistsError(
                f"adapter {name!r} already exists (digest {existing.digest[:12]}); "
                "remove it first, or replace it",
                param="name",
            )
        holder = None if task_id is None else self._names_by_task.get(owner, {}).get(task_id)
        if holder is not None and holder != name:
            raise AdapterExistsError(
                f"LoRA task {task_id} already is adapter {holder!r}", param="task_id"
            )

    def add(
        self,
        model: str,
        tenant: str,
        name: str,
        staged: StagedAdapter,
        *,
        path: str,
        task_id: int | None = None,
        replace: bool = False,
    ) -> AdapterVersion:
        """Register a staged adapter. Raises as check_free; then nothing has changed.

        A replacement is a new version; without a task id of its own it keeps the old one's.
        """
        self.check_free(model, tenant, name, task_id, replace=replace)
        old = self._versions.get((model, tenant), {}).get(name)
        if old is not None:
            task_id = old.task_id if task_id is None else task_id
            self._drop(old)
        version = AdapterVersion(
            model=model,
            tenant=tenant,
            name=name,
            task_id=task_id,
            number=1 if old is None else old.number + 1,
            staged=staged,
            path=path,
            created=int(self._unix_seconds()),
        )
        self._put(version)
        return version

    def remove(self, ref: AdapterRef) -> AdapterVersion:
        """Forget a name; the version that it meant. Raises AdapterNotFoundError."""
        version = self.resolve(ref)
        self._drop(version)
        return version

    def resolve(self, ref: AdapterRef) -> AdapterVersion:
        """The present version. Raises AdapterNotFoundError, which names what there is."""
        found = self.find(ref)
        if found is None:
            names = list(self._versions.get((ref.model, ref.tenant), {}))
            raise AdapterNotFoundError(_not_found(ref.key, ref.model, names))
        return found

    def find(self, ref: AdapterRef) -> AdapterVersion | None:
        """The present version, if there is one."""
        owner = (ref.model, ref.tenant)
        versions = self._versions.get(owner, {})
        match ref.key:
            case ByName(name):
                return versions.get(name)
            case ByTaskId(task_id):
                return versions.get(self._names_by_task.get(owner, {}).get(task_id, ""))
            case ByDigest(digest):
                return next((v for v in versions.values() if v.digest == digest), None)

    def list(self, tenant: str, model: str | None = None) -> list[AdapterVersion]:
        """A tenant's adapters, by model and name."""
        return sorted(
            (
                version
                for (its_model, its_tenant), versions in self._versions.items()
                if its_tenant == tenant and model in (None, its_model)
                for version in versions.values()
            ),
            key=lambda version: (version.model, version.name),
        )

    def _put(self, version: AdapterVersion) -> None:
        owner = (version.model, version.tenant)
        self._versions.setdefault(owner, {})[version.name] = version
        if version.task_id is not None:
            self._names_by_task.setdefault(owner, {})[version.task_id] = version.name

    def _drop(self, version: AdapterVersion) -> None:
        owner = (version.model, version.tenant)
        del self._versions[owner][version.name]
        if version.task_id is not None:
            del self._names_by_task[owner][version.task_id]


def _check_name(name: str) -> None:
    if not 1 <= len(name) <= MAX_NAME_LENGTH:
        raise InvalidParameterError(
            f"an adapter's name must have 1 to {MAX_NAME_LENGTH} characters, got {len(name)}",
            param="name",
        )
    bad = next((c for c in name if unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp")), None)
    if bad is not None:
        raise InvalidParameterError(
            f"an adapter's name must not hold the control character U+{ord(bad):04X}", param="name"
        )


def _check_task_id(task_id: int | None) -> None:
    if task_id is not None and not 0 <= task_id <= MAX_TASK_ID:
        raise InvalidParameterError(
            f"a LoRA task id must be in [0, {MAX_TASK_ID}], got {task_id}", param="task_id"
        )


def _not_found(key: AdapterKey, model: str, names: list[str]) -> str:
    """Clients of TensorRT-LLM look for the sentence about a task id: it must stay as it is."""
    match key:
        case ByName(name):
            missing = f"adapter {name!r} not found for model {model!r}"
            names = _nearest_first(name, names)
        case ByTaskId(task_id):
            missing = (
                f"LoRA task {task_id} not found in cache. "
                "Please send LoRA weights with request, or register an adapter with this task id"
            )
        case ByDigest(digest):
            missing = f"no adapter of model {model!r} has digest {digest}"
    if not names:
        return f"{missing}; no adapter is registered"
    told = ", ".join(repr(name) for name in names[:_MOST_NAMES_TOLD])
    more = f" and {len(names) - _MOST_NAMES_TOLD} more" if len(names) > _MOST_NAMES_TOLD else ""
    return f"{missing}; known adapters: {told}{more}"


def _nearest_first(wanted: str, names: list[str]) -> list[str]:
    near = difflib.get_close_matches(wanted, names, n=_MOST_NAMES_TOLD)
    return near + sorted(name for name in names if name not in near)
