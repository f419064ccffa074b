"""What the environment says: settings, directories, and what our own processes are to see of it.

This is the only file that reads the environment.
"""

import os
from collections.abc import Mapping
from pathlib import Path

from loraplex.core.config import NO_CACHE

ENVIRONMENT_PREFIX = "LORAPLEX_"
_SLEEPING_THREADS = ("OMP_WAIT_POLICY", "PASSIVE")


def environment_fields(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """The LORAPLEX_* variables by field name."""
    variables = os.environ if environment is None else environment
    return {
        name.removeprefix(ENVIRONMENT_PREFIX).lower(): value
        for name, value in variables.items()
        if name.startswith(ENVIRONMENT_PREFIX)
    }


def state_directory(configured: str) -> Path:
    """Where staged adapters live: as configured, or by the XDG rule."""
    if configured:
        return Path(configured).expanduser()
    base = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(base).expanduser() / "loraplex"


def weights_cache_directory(configured: str, state_dir: str) -> Path | None:
    """Where packed weights live; None: nowhere. state_dir: as configured."""
    if configured == NO_CACHE:
        return None
    if configured:
        return Path(configured).expanduser()
    if state_dir:
        return state_directory(state_dir) / "weights"
    return cache_directory() / "weights"


def cache_directory() -> Path:
    """What can be made again lives here, by the XDG rule."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "loraplex"


def child_environment() -> dict[str, str]:
    """The environment for our own processes: settings reach them by message, not by variable."""
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(ENVIRONMENT_PREFIX)
    }
    environment.setdefault(*_SLEEPING_THREADS)
    return environment


def let_threads_sleep() -> None:
    """For this process, unless the operator decided otherwise: call it before torch is imported.

    OpenMP's threads spin at barriers by default. Beside any other busy process a spinning thread
    keeps its partner off the processor: steps of a small model then take a hundred times longer.
    """
    os.environ.setdefault(*_SLEEPING_THREADS)
