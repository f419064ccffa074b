"""Runs the tests of the kernels in C++ (native/tests) on compiled libraries, and programs where no
compiler is."""

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

NATIVE = Path(__file__).parents[2] / "native"
CPU_CANNOT_RUN_IT = 77
_FEWEST_OPS = 20
# Libraries of another CPU: their C++ compiler, and an emulator with their C library.
_FOREIGN = {
    "aarch64": ("aarch64-linux-gnu-g++", ("qemu-aarch64", "-L", "/usr/aarch64-linux-gnu")),
}

Report = subprocess.CompletedProcess[str]


def need(*tools: str) -> None:
    """Skip the test if a program is missing."""
    if missing := [tool for tool in tools if shutil.which(tool) is None]:
        pytest.skip(f"there is no {' and no '.join(missing)}")


def run(*command: str | Path, cwd: Path | None = None) -> Report:
    """Return the status of a command, and all that it printed."""
    return subprocess.run(
        command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )


def selftest(libraries: Path, machine: str, scratch: Path) -> Mapping[str, Report]:
    """Run the tests on every library of a folder; return the reports by the libraries' names."""
    compiler, emulator = ("c++", ()) if machine == os.uname().machine else _FOREIGN[machine]
    need(compiler, *emulator[:1])
    flags = ("-std=c++20", "-O1", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror")
    sources = sorted((NATIVE / "tests").glob("*.cpp"))
    compiled = run(compiler, *flags, f"-I{NATIVE / 'include'}", "-c", *sources, cwd=scratch)
    assert compiled.returncode == 0, compiled.stdout
    reports = {}
    for library in libraries.glob("libloraplex_*.so"):
        program = scratch / library.stem
        linked = run(compiler, *scratch.glob("*.o"), library, "-pthread", "-o", program)
        assert linked.returncode == 0, linked.stdout
        reports[library.name] = run(*emulator, program)
    return reports


def check_report(finished: Report) -> None:
    """Fail unless every op passed its tests, or this CPU cannot run the library."""
    if finished.returncode != CPU_CANNOT_RUN_IT:
        assert finished.returncode == 0, finished.stdout
        assert len(re.findall(r" ok: 0 of \d+ checks failed", finished.stdout)) >= _FEWEST_OPS


def without_compiler(folder: Path) -> dict[str, str]:
    """Return variables of a process that finds the programs of an environment only."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONPATH", "CC", "CXX", "LORAPLEX_NATIVE")
    }
    environment = {**kept, "PATH": str(folder / "bin"), "HOME": str(folder / "home")}
    found = [name for name in ("c++", "g++", "cc") if shutil.which(name, path=environment["PATH"])]
    assert found == []
    return environment
