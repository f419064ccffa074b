"""Commands and environment of the Python processes that the server starts.

`python -m` puts the current folder first in the module search path: a file http.py there would run
in place of the standard library's, in the processes that read users' files. So our processes start
with -P (safe path). PYTHONPATH stays in use; it belongs to the operator.
"""

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

_SEARCH_PATH: Final = "PYTHONPATH"
_SAFE_PATH: Final = "PYTHONSAFEPATH"
_PACKAGE_PARENT: Final = str(Path(__file__).resolve().parents[2])


def module_command(module: str, *arguments: str, python: str = sys.executable) -> tuple[str, ...]:
    """Return the command that runs a module, without the current folder in the search path."""
    return (python, "-P", "-m", module, *arguments)


def with_safe_path(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment in which no Python process searches its current folder by itself.

    It holds for the processes that ours start in turn (Ray, compilers). An empty entry of
    PYTHONPATH, as `PYTHONPATH=$PYTHONPATH:/more` leaves one, means the current folder as well.
    """
    safe = {**environment, _SAFE_PATH: "1"}
    entries = [entry for entry in environment.get(_SEARCH_PATH, "").split(os.pathsep) if entry]
    if _is_run_from_its_folder():
        entries.append(_PACKAGE_PARENT)
    safe.pop(_SEARCH_PATH, None)
    return safe | ({_SEARCH_PATH: os.pathsep.join(entries)} if entries else {})


def _is_run_from_its_folder() -> bool:
    """Whether `python -m loraplex` found this package only because it runs in its parent folder."""
    first = sys.path[0] if sys.path else _PACKAGE_PARENT
    return not sys.flags.safe_path and str(Path(first).resolve()) == _PACKAGE_PARENT
