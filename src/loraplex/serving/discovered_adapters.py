"""Configured and declared adapters, also those that have not been validated yet.

These are plain values: nothing is read here.
"""

import dataclasses
from collections.abc import Iterator

from loraplex.adapters.declaration import Declaration
from loraplex.core.adapter import AdapterKey, ByDigest, ByName, ByTaskId
from loraplex.core.principal import DEFAULT_TENANT


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


class DiscoveredAdapters:
    """Adapters of one model that are known by name and not validated yet, in their order.

    A stored version of such a name may be outdated: validate the adapter before it is used.
    """

    def __init__(self) -> None:
        self._by_name: dict[tuple[str, str], ConfiguredAdapter] = {}
        self._names_by_task: dict[tuple[str, int], str] = {}
        self._names_by_alias: dict[tuple[str, str], str] = {}

    def put(self, adapter: ConfiguredAdapter) -> None:
        self.drop(adapter.name, adapter.tenant)
        self._by_name[adapter.tenant, adapter.name] = adapter
        if adapter.task_id is not None:
            self._names_by_task[adapter.tenant, adapter.task_id] = adapter.name
        for alias in adapter.aliases:
            self._names_by_alias[adapter.tenant, alias] = adapter.name

    def drop(self, name: str, tenant: str = DEFAULT_TENANT) -> ConfiguredAdapter | None:
        """Remove an adapter, which was validated or has disappeared; return it."""
        adapter = self._by_name.pop((tenant, name), None)
        if adapter is not None and adapter.task_id is not None:
            self._names_by_task.pop((tenant, adapter.task_id), None)
        for alias in () if adapter is None else adapter.aliases:
            self._names_by_alias.pop((tenant, alias), None)
        return adapter

    def drop_declared(self, tenant: str, name: str) -> None:
        """Remove an adapter that only a declaration names."""
        adapter = self.of(tenant, name)
        if adapter is not None and adapter.declaration is not None:
            self.drop(name, tenant)

    def of(self, tenant: str, name: str) -> ConfiguredAdapter | None:
        """Return a tenant's adapter by its own name."""
        return self._by_name.get((tenant, name))

    def find(self, key: AdapterKey, tenant: str = DEFAULT_TENANT) -> ConfiguredAdapter | None:
        """Return the adapter of a name, an alias or a task id; a digest is not known yet."""
        match key:
            case ByName(name):
                found = self.of(tenant, name)
                return found or self.of(tenant, self._names_by_alias.get((tenant, name), ""))
            case ByTaskId(task_id):
                return self.of(tenant, self._names_by_task.get((tenant, task_id), ""))
            case ByDigest():
                return None

    def __iter__(self) -> Iterator[ConfiguredAdapter]:
        return iter(tuple(self._by_name.values()))

    def __len__(self) -> int:
        return len(self._by_name)
