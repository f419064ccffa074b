"""Memory of the machine, or of the container that this process runs in."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_ROOT: Final = Path("/")
_CGROUPS: Final = "sys/fs/cgroup"


def host_memory(root: Path = _ROOT) -> int | None:
    """Return the bytes that this process and others of its container may use; None: not known.

    The least of the machine's memory and the limits of Linux's control groups. root: the folder
    of `proc` and `sys`. Sources: cgroups(7), memory.max of control groups of version 2, and
    memory.limit_in_bytes of version 1.
    """
    try:
        of_machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return None
    return min([of_machine, *_limits(root)])


def _limits(root: Path) -> Iterator[int]:
    """Yield the limits of the control groups above this process; a container sees its own only."""
    group = Path()
    with contextlib.suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            if line.startswith("0::/"):
                group = Path(line.removeprefix("0::/"))
    folders = (root / _CGROUPS / each for each in (group, *group.parents))
    files = (folder / "memory.max" for folder in folders)
    for path in (*files, root / _CGROUPS / "memory/memory.limit_in_bytes"):
        # `max` is no limit.
        with contextlib.suppress(OSError, ValueError):
            yield int(path.read_text())
