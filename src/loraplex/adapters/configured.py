"""What a configuration that names adapters takes away from a store. Decides; changes nothing."""

import dataclasses
from collections.abc import Iterable, Mapping

from loraplex.adapters.version import AdapterVersion, Origin


@dataclasses.dataclass(frozen=True, slots=True)
class Reconfigured:
    """What went, so that the configured names and task ids are free."""

    removed: tuple[AdapterVersion, ...]
    """Adapters that only an earlier configuration had named."""
    aliases: tuple[str, ...]
    """Those whose name the configuration wants."""
    task_ids: tuple[AdapterVersion, ...]
    """As they were: adapters that lost their task id."""


def reconfigure(
    versions: Iterable[AdapterVersion],
    aliases: Iterable[str],
    task_ids: Mapping[str, int | None],
) -> Reconfigured:
    """Of one owner: its present versions, its aliases, and the configured name -> task id."""
    names_by_task = {task_id: name for name, task_id in task_ids.items()}
    staying: list[AdapterVersion] = []
    removed: list[AdapterVersion] = []
    for version in versions:
        is_stale = version.origin is Origin.CONFIGURED and version.name not in task_ids
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
