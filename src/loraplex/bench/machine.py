"""Where and with what a result was made: the machine, the version, the commit."""

import os
import platform
import subprocess
from pathlib import Path

import msgspec

from loraplex.core.version import __version__

_PACKAGE = Path(__file__).parent.parent
_CPU_INFO = Path("/proc/cpuinfo")


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """Of the load generator; the server's too, unless that was addressed by a URL."""

    cpu_model: str
    num_cores: int
    memory_bytes: int | None
    system: str
    python: str
    load_average: float | None
    """Runnable processes in the last minute, before the start: 0 is a quiet machine."""


class Code(msgspec.Struct, frozen=True, kw_only=True):
    """Which loraplex made the load, and served it unless it was addressed by a URL."""

    version: str
    commit: str | None
    """None: this copy is not in a repository."""
    is_modified: bool
    """Whether the package's tracked files differ from the commit."""


def this_machine() -> Machine:
    return Machine(
        cpu_model=_cpu_model(),
        num_cores=os.cpu_count() or 1,
        memory_bytes=_memory_bytes(),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        python=platform.python_version(),
        load_average=os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
    )


def this_code(package: Path = _PACKAGE) -> Code:
    # A virtual environment may lie in a repository of something else: the file must be its own.
    is_tracked = _git(package, "ls-files", "--error-unmatch", "__init__.py") is not None
    commit = _git(package, "rev-parse", "HEAD") if is_tracked else None
    changes = _git(package, "status", "--porcelain", "--untracked-files=no", "--", ".")
    return Code(
        version=__version__, commit=commit, is_modified=commit is not None and bool(changes)
    )


def _git(folder: Path, *arguments: str) -> str | None:
    """What git says; None if there is no git, or it refuses."""
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=folder, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def _cpu_model() -> str:
    if _CPU_INFO.exists():
        for line in _CPU_INFO.read_text(errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return None
