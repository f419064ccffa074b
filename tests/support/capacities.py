"""Changed capacities of runners with one cache group."""

from typing import Any

import msgspec

from loraplex.core.plan import CacheGroupCapacity, Capacity

_GROUP_FIELDS = frozenset(CacheGroupCapacity.__struct_fields__)


def changed_capacity(capacity: Capacity, **changes: Any) -> Capacity:
    """Return a capacity with changed fields; those of CacheGroupCapacity change its only group."""
    of_group = {name: changes.pop(name) for name in sorted(_GROUP_FIELDS & changes.keys())}
    if of_group:
        (group,) = capacity.cache_groups
        changes["cache_groups"] = (msgspec.structs.replace(group, **of_group),)
    return msgspec.structs.replace(capacity, **changes)
