"""The place of a peer that the user gives: a virtual environment with its package."""

import subprocess
from pathlib import Path

from loraplex.core.errors import ConfigError

_VERSION_SECONDS = 10.0


def venv_python(name: str, place: Path) -> Path:
    """The Python of a virtual environment's folder, or that Python itself. Raises ConfigError."""
    python = place / "bin" / "python" if place.is_dir() else place
    if not python.is_file():
        raise ConfigError(f"{name}: {place} is neither a virtual environment nor a Python")
    # Not resolved: the link's own folder is what makes it the environment's Python.
    return python.absolute()


def package_versions(python: Path, *packages: str) -> str:
    """ "torch 2.13.0, peft 0.19.1", as that Python sees them; "" if one is not installed."""
    code = (
        "import importlib.metadata, sys\n"
        "print(', '.join(f'{name} {importlib.metadata.version(name)}' for name in sys.argv[1:]))"
    )
    try:
        done = subprocess.run(
            [str(python), "-c", code, *packages],
            capture_output=True,
            text=True,
            timeout=_VERSION_SECONDS,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()
