"""Changed capacities of runners with one KV group."""

from typing import Any

import msgspec

from loraplex.core.plan import Capacity, KVGroupCapacity

_GROUP_FIELDS = frozenset(KVGroupCapacity.__struct_fields__)


def changed_capacity(capacity: Capacity, **changes: Any) -> Capacity:
    """Return a capacity with changed fields; those of KVGroupCapacity change its only KV group."""
    of_group = {name: changes.pop(name) for name in sorted(_GROUP_FIELDS & changes.keys())}
    if of_group:
        (group,) = capacity.kv_groups
        changes["kv_groups"] = (msgspec.structs.replace(group, **of_group),)
    return msgspec.structs.replace(capacity, **changes)
