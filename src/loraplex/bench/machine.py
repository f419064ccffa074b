"""Where and with what a result was made: the machine, the version, the commit."""

import contextlib
import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Iterator
from pathlib import Path

import msgspec

from loraplex.core.devices import processor_field, processor_name
from loraplex.core.host_memory import host_memory
from loraplex.core.version import __version__

_PACKAGE = Path(__file__).parent.parent
_PACKAGES = ("torch", "numpy", "aiohttp", "uvicorn")
_RELEVANT_FLAGS = (
    "avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512_vnni", "avx512_bf16", "avx_vnni",
    "amx_bf16", "amx_int8", "asimd", "asimdhp", "asimddp", "i8mm", "bf16", "sve",
)  # fmt: skip


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """Machine of the load generator, and of the server unless it was given by its URL."""

    cpu_model: str
    num_cores: int
    memory_bytes: int | None
    system: str
    python: str
    load_average: float | None
    """Runnable processes in the last minute, before the start: 0 is a quiet machine."""
    cpu_flags: tuple[str, ...] = ()
    """Its instruction sets and other abilities, as Linux names them."""
    packages: dict[str, str] = {}
    """Versions of what loraplex computes and speaks with."""


class Code(msgspec.Struct, frozen=True, kw_only=True):
    """Which loraplex made the load, and served it unless it was addressed by a URL."""

    version: str
    commit: str | None
    """None: this copy is not in a repository."""
    is_modified: bool
    """Whether the package's tracked files differ from the commit."""


def this_machine() -> Machine:
    return Machine(
        cpu_model=processor_name(),
        num_cores=os.cpu_count() or 1,
        memory_bytes=host_memory(),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        python=platform.python_version(),
        load_average=load_average(),
        cpu_flags=tuple(
            sorted((processor_field("flags") or processor_field("Features") or "").split())
        ),
        packages=_package_versions(),
    )


def load_average() -> float | None:
    """Runnable processes over the last minute; None if the system does not report it."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None


def machine_lines(created: str, code: Code, machine: Machine) -> Iterator[str]:
    """When, with what and on what a result was made, for people."""
    modified = " with changes" if code.is_modified else ""
    yield f"{created}, loraplex {code.version}, commit {code.commit or 'unknown'}{modified}"
    memory = "" if machine.memory_bytes is None else f", {machine.memory_bytes / 2**30:.0f} GiB"
    yield (
        f"{machine.cpu_model}, {machine.num_cores} cores{memory}, {machine.system}, "
        f"Python {machine.python}"
    )
    if found := [flag for flag in _RELEVANT_FLAGS if flag in machine.cpu_flags]:
        yield f"instruction sets: {', '.join(found)}"
    if machine.packages:
        yield ", ".join(f"{name} {version}" for name, version in machine.packages.items())
    if machine.load_average is not None:
        yield f"load average before the start: {machine.load_average:.2f}"


def this_code(package: Path = _PACKAGE) -> Code:
    # A virtual environment may lie in a repository of something else: the file must be its own.
    is_tracked = _git(package, "ls-files", "--error-unmatch", "__init__.py") is not None
    commit = _git(package, "rev-parse", "HEAD") if is_tracked else None
    changes = _git(package, "status", "--porcelain", "--untracked-files=no", "--", ".")
    return Code(
        version=__version__, commit=commit, is_modified=commit is not None and bool(changes)
    )


def _git(folder: Path, *arguments: str) -> str | None:
    """Return the output of git; None if there is no git, or it refuses."""
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=folder, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def _package_versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found
