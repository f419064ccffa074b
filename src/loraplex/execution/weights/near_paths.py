"""Errors for paths that do not exist, with the existing names that are nearest to them."""

import difflib
import itertools
import os
from pathlib import Path

from loraplex.core.errors import ConfigError

_MAX_ENTRIES = 10_000
"""Maximum number of names of a folder that are compared."""
_MAX_NEAR = 3


def check_exists(path: str, what: str) -> None:
    """Raise ConfigError if there is nothing at a path. what: its kind, such as `folder`."""
    place = Path(path).expanduser()
    try:
        exists = place.exists()
    except OSError as error:
        raise ConfigError(f"cannot open the {what} {path}: {error.strerror}") from error
    if not exists:
        raise ConfigError(f"there is no {what} {path}{near_paths(place)}")


def near_paths(path: Path) -> str:
    """Return the rest of an error message: the paths that a missing path may be a typo of.

    Lists names of the first folder that exists, so only for paths of the operator.
    """
    missing = path
    while not missing.parent.is_dir():
        if missing.parent == missing:
            return ""
        missing = missing.parent
    folder = missing.parent
    try:
        with os.scandir(folder) as entries:
            names = [entry.name for entry in itertools.islice(entries, _MAX_ENTRIES)]
    except OSError:
        return ""
    near = difflib.get_close_matches(missing.name, names, _MAX_NEAR)
    if near:
        return "; did you mean " + " or ".join(str(folder / name) for name in near) + "?"
    return f"; {folder} has nothing of that name" if missing != path else ""
