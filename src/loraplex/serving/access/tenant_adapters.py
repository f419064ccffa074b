"""What one tenant sees of a model's adapters: its own, and those of the server that it may.

An own adapter hides one of the server's that has its name or task id. What a tenant may neither
use nor list is for it as if it were not there: errors are those of an unknown adapter.

Configured and declared adapters are plain values here, also those that have not been validated yet.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import NamedTuple

from loraplex.adapters.declaration import Declaration
from loraplex.adapters.index import not_found
from loraplex.adapters.store import AdapterStore, AdapterVersion
from loraplex.core.adapter import AdapterKey, AdapterRef, ByDigest, ByName, ByTaskId
from loraplex.core.errors import AdapterLoadError, PermissionDeniedError
from loraplex.core.principal import DEFAULT_TENANT, Names, Principal


@dataclasses.dataclass(frozen=True, slots=True)
class ConfiguredAdapter:
    name: str
    path: str
    task_id: int | None
    is_named: bool
    """Whether it is named individually and must load; otherwise it may be left out."""
    is_followed: bool = False
    """Whether it may appear, change and disappear while the server runs."""
    tenant: str = DEFAULT_TENANT
    declaration: Declaration | None = None
    """Declaration that names it; None: the configuration of this server does."""

    @property
    def aliases(self) -> tuple[str, ...]:
        return () if self.declaration is None else self.declaration.aliases


class LeftOut(NamedTuple):
    """Entry of a folder that may be or hold an adapter, and is not served."""

    path: str
    reason: str
    is_link: bool = False


class DiscoveredAdapters:
    """Adapters of one model that are known by name and not validated yet, in their order.

    A stored version of such a name may be outdated: validate the adapter before it is used.
    """

    def __init__(self) -> None:
        self.by_name: dict[tuple[str, str], ConfiguredAdapter] = {}
        """Adapters by tenant and own name. Only `put` and `drop` change it."""
        self._names_by_task: dict[tuple[str, int], str] = {}
        self._names_by_alias: dict[tuple[str, str], str] = {}

    def put(self, adapter: ConfiguredAdapter) -> None:
        self.drop(adapter.name, adapter.tenant)
        self.by_name[adapter.tenant, adapter.name] = adapter
        if adapter.task_id is not None:
            self._names_by_task[adapter.tenant, adapter.task_id] = adapter.name
        for alias in adapter.aliases:
            self._names_by_alias[adapter.tenant, alias] = adapter.name

    def drop(self, name: str, tenant: str = DEFAULT_TENANT) -> ConfiguredAdapter | None:
        """Remove an adapter, which was validated or has disappeared; return it."""
        adapter = self.by_name.pop((tenant, name), None)
        if adapter is not None and adapter.task_id is not None:
            self._names_by_task.pop((tenant, adapter.task_id), None)
        for alias in () if adapter is None else adapter.aliases:
            self._names_by_alias.pop((tenant, alias), None)
        return adapter

    def drop_declared(self, tenant: str, name: str) -> None:
        """Remove an adapter that only a declaration names."""
        adapter = self.by_name.get((tenant, name))
        if adapter is not None and adapter.declaration is not None:
            self.drop(name, tenant)

    def find(self, key: AdapterKey, tenant: str = DEFAULT_TENANT) -> ConfiguredAdapter | None:
        """Return the adapter of a name, an alias or a task id; a digest is not known yet."""
        match key:
            case ByName(name):
                found = self.by_name.get((tenant, name))
                alias = self._names_by_alias.get((tenant, name), "")
                return found or self.by_name.get((tenant, alias))
            case ByTaskId(task_id):
                named = self._names_by_task.get((tenant, task_id), "")
                return self.by_name.get((tenant, named))
            case ByDigest():
                return None

    def __iter__(self) -> Iterator[ConfiguredAdapter]:
        return iter(tuple(self.by_name.values()))

    def __len__(self) -> int:
        return len(self.by_name)


class TenantAdapters:
    """Adapters of one model as one request sees them; cheap to make."""

    def __init__(
        self,
        store: AdapterStore,
        model: str,
        principal: Principal,
        discovered: DiscoveredAdapters,
    ) -> None:
        self._store = store
        self._model = model
        self.principal = principal
        self._discovered = discovered
        own = principal.tenant
        self._tenants = (own,) if own == DEFAULT_TENANT else (own, DEFAULT_TENANT)
        """Tenants whose adapters may be seen, the own first."""

    def listed(self) -> list[AdapterVersion]:
        """Those that are shown, by name."""
        shown: dict[str, AdapterVersion] = {}
        for tenant in self._tenants:
            for version in self._store.list(tenant, self._model):
                if version.name in self.principal.rights.list:
                    shown.setdefault(version.name, version)
        return [shown[name] for name in sorted(shown)]

    def discovered(self) -> list[ConfiguredAdapter]:
        """Return the listed adapters that have not been validated yet, of which none is stored.

        Of two that have one name, the tenant's own adapter is listed.
        """
        taken: set[str] = set()
        for tenant in self._tenants:
            taken.update(version.name for version in self._store.list(tenant, self._model))
            taken.update(self._store.aliases(tenant, self._model))
        shown: dict[str, ConfiguredAdapter] = {}
        for one in self._discovered:
            is_seen = one.tenant in self._tenants and one.name in self.principal.rights.list
            if is_seen and one.name not in taken and (one.name not in shown or self.owns(one)):
                shown[one.name] = one
        return list(shown.values())

    def unvalidated(self, key: AdapterKey) -> ConfiguredAdapter | None:
        """Return what a key means, if that must be validated before it is used."""
        rights = self.principal.rights
        for tenant in self._tenants:
            version = self._store.find(AdapterRef(self._model, tenant, key))
            if version is not None and (version.name in rights.use or version.name in rights.list):
                return self._discovered.by_name.get((tenant, version.name))
            found = self._discovered.find(key, tenant)
            if found is not None and (found.name in rights.use or found.name in rights.list):
                return found
        return None

    def knows(self, key: AdapterKey) -> bool:
        """Whether a key means an adapter, validated or not."""
        return self.find(key) is not None or self.unvalidated(key) is not None

    def find(self, key: AdapterKey) -> AdapterVersion | None:
        """What a key means for who may use or list it."""
        rights = self.principal.rights
        return self._among(key, rights.use) or self._among(key, rights.list) or self._kept(key)

    def recall(self, digest: str, check: Callable[[AdapterVersion], object]) -> None:
        """Look in the histories for a version that requests are to find by its digest.

        Blocks. Raises as AdapterStore.recall.
        """
        for tenant in self._tenants:
            if self._store.recall((self._model, tenant), digest, check) is not None:
                return

    def resolve(self, key: AdapterKey) -> AdapterVersion:
        """What a request will run with.

        Raises AdapterNotFoundError, PermissionDeniedError for one that is only listed, or
        AdapterLoadError if its canonical adapter file is gone.
        """
        version = self._among(key, self.principal.rights.use) or self._kept(key)
        if version is None:
            listed = self._shown(key)
            raise self._refused("use", listed.name, self.principal.rights.use)
        if version.digest not in self._store.missing_digests:
            return version
        if self.owns(version):
            return self._store.resolve(AdapterRef(self._model, version.tenant, key))
        raise AdapterLoadError(
            f"the server's adapter {version.name!r} is gone from the disk: its operator must load "
            "it again"
        )

    def described(self, key: AdapterKey) -> AdapterRef:
        """Where the listed adapter of a key is. Raises AdapterNotFoundError."""
        return AdapterRef(self._model, self._shown(key).tenant, key)

    def managed(self, key: AdapterKey) -> AdapterRef:
        """An own adapter that may be changed.

        Raises AdapterNotFoundError, or PermissionDeniedError for a listed one of the server's.
        """
        ref = AdapterRef(self._model, self.principal.tenant, key)
        own = self._store.find(ref)
        if own is None:
            shown = self._shown(key)
            raise PermissionDeniedError(
                f"adapter {shown.name!r} is the server's own: tenant "
                f"{self.principal.tenant!r} may not change it"
            )
        self.check_manages(own.name)
        return ref

    def check_manages(self, name: str) -> None:
        """Raise PermissionDeniedError unless an own adapter may have this name, and be changed."""
        if name not in self.principal.rights.manage:
            raise self._refused("manage", name, self.principal.rights.manage)

    def _refused(self, right: str, name: str, names: Names) -> PermissionDeniedError:
        line = self.principal.right_line(right, names.with_name(name))
        return PermissionDeniedError(
            f"tenant {self.principal.tenant!r} may not {right} adapter {name!r}: {line}"
        )

    def owns(self, adapter: AdapterVersion | ConfiguredAdapter) -> bool:
        return adapter.tenant == self.principal.tenant

    def _shown(self, key: AdapterKey) -> AdapterVersion:
        version = self._among(key, self.principal.rights.list)
        if version is None:
            raise not_found(key, self._model, dict(self._known()))
        return version

    def _known(self) -> Iterator[tuple[str, int | None]]:
        """What is listed: names with their task ids, and aliases."""
        listed = self.listed()
        for version in listed:
            yield version.name, version.task_id
        for adapter in self.discovered():
            yield adapter.name, adapter.task_id
        shown = {(version.tenant, version.name) for version in listed}
        for tenant in self._tenants:
            for alias, name in self._store.aliases(tenant, self._model).items():
                if (tenant, name) in shown:
                    yield alias, None

    def _kept(self, key: AdapterKey) -> AdapterVersion | None:
        """Return the recalled version of a digest that no name has at present."""
        if isinstance(key, ByDigest):
            for tenant in self._tenants:
                version = self._store.kept((self._model, tenant), key.digest)
                if version is not None and version.name in self.principal.rights.use:
                    return version
        return None

    def _among(self, key: AdapterKey, right: Names) -> AdapterVersion | None:
        for tenant in self._tenants:
            version = self._store.find(AdapterRef(self._model, tenant, key))
            if version is not None and version.name in right:
                return version
        return None
