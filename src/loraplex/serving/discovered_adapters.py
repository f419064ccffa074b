"""Configured adapters, and those found in folders that have not been validated yet.

These are plain values: nothing is read here.
"""

import dataclasses
from collections.abc import Iterator

from loraplex.core.adapter import AdapterKey, ByDigest, ByName, ByTaskId


@dataclasses.dataclass(frozen=True, slots=True)
class ConfiguredAdapter:
    name: str
    path: str
    task_id: int | None
    is_named: bool
    """Whether it is named individually and must load; otherwise it may be left out."""
    is_followed: bool = False
    """Whether it may appear, change and disappear while the server runs."""


class DiscoveredAdapters:
    """Adapters of one model that are known by name and not validated yet, in their order.

    A stored version of such a name may be outdated: validate the adapter before it is used.
    """

    def __init__(self) -> None:
        self._by_name: dict[str, ConfiguredAdapter] = {}
        self._names_by_task: dict[int, str] = {}

    def put(self, adapter: ConfiguredAdapter) -> None:
        self.drop(adapter.name)
        self._by_name[adapter.name] = adapter
        if adapter.task_id is not None:
            self._names_by_task[adapter.task_id] = adapter.name

    def drop(self, name: str) -> ConfiguredAdapter | None:
        """Remove an adapter, which was validated or has disappeared; return it."""
        adapter = self._by_name.pop(name, None)
        if adapter is not None and adapter.task_id is not None:
            self._names_by_task.pop(adapter.task_id, None)
        return adapter

    def find(self, key: AdapterKey) -> ConfiguredAdapter | None:
        """Return the adapter of a name or a task id; a digest is not known yet."""
        match key:
            case ByName(name):
                return self._by_name.get(name)
            case ByTaskId(task_id):
                return self._by_name.get(self._names_by_task.get(task_id, ""))
            case ByDigest():
                return None

    def __contains__(self, name: str) -> bool:
        return name in self._by_name

    def __iter__(self) -> Iterator[ConfiguredAdapter]:
        return iter(tuple(self._by_name.values()))

    def __len__(self) -> int:
        return len(self._by_name)
