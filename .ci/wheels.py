"""Build the sdist and, from it, one wheel for each kind of CPU, with compiled native kernels.

    python .ci/wheels.py dist

Zig's C++ compiler builds for both kinds of CPU and for an old glibc on any machine. auditwheel
checks what a library needs of the system, and writes the tag; it only knows the tags of the machine
that it runs on, so `make test-wheel` alone checks the other wheel. Needs the extra `wheel`.
"""

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

MACHINES = ("x86_64", "aarch64")
GLIBC = "2.28"
"""Minimum version of glibc, which is that of torch's own wheels."""


def zig() -> Path:
    """Return the path of the compiler that the package ziglang contains."""
    found = importlib.util.find_spec("ziglang")
    if found is None or found.origin is None:
        raise SystemExit('ziglang is not installed: use `make wheel`, or pip install ".[wheel]"')
    return Path(found.origin).with_name("zig")


def is_here(machine: str) -> bool:
    """Return whether this machine is of the kind."""
    return machine == os.uname().machine


def platform_tag(machine: str) -> str:
    """Return the tag of a wheel for this machine."""
    return f"manylinux_{GLIBC.replace('.', '_')}_{machine}"


def build_environment(machine: str, compiler: Path) -> dict[str, str]:
    """Return the variables that make the build backend compile for this machine."""
    return {
        "CXX": f"{compiler} c++ -target {machine}-linux-gnu.{GLIBC}",
        # The names of functions that only a debugger reads are most of a library.
        "LDFLAGS": "-s",
        "CMAKE_ARGS": f"-DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR={machine}",
        "CMAKE_GENERATOR": "Ninja",
        "_PYTHON_HOST_PLATFORM": f"linux-{machine}" if is_here(machine) else platform_tag(machine),
        "LORAPLEX_NATIVE": "1",
    }


def run(*command: str | Path, folder: Path, environment: dict[str, str]) -> str:
    """Run a command, and return the last line that it prints."""
    finished = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if finished.returncode != 0:
        raise SystemExit(f"{finished.stdout}\n{command[0]} failed")
    return finished.stdout.rstrip().rpartition("\n")[2]


def call_backend(hook: str, source: Path, target: Path, environment: dict[str, str]) -> Path:
    """Call a hook of the build backend in a process, and return the path of what it built."""
    program = f"import sys, scikit_build_core.build as backend; print(backend.{hook}(sys.argv[1]))"
    name = run(sys.executable, "-c", program, target, folder=source, environment=environment)
    return target / name


def build(source: Path, target: Path) -> list[Path]:
    """Build all distributions of a source tree, and return their paths."""
    target.mkdir(parents=True, exist_ok=True)
    sdist = call_backend("build_sdist", source, target, {})
    built = [sdist]
    for machine in MACHINES:
        with tempfile.TemporaryDirectory() as scratch:
            with tarfile.open(sdist) as archive:
                archive.extractall(scratch, filter="data")
            tree = Path(scratch) / sdist.name.removesuffix(".tar.gz")
            environment = build_environment(machine, zig())
            raw = call_backend("build_wheel", tree, Path(scratch), environment)
            if is_here(machine):
                built.append(repair(raw, target, machine))
            else:
                built.append(Path(shutil.move(raw, target)))
    return built


def repair(raw: Path, target: Path, machine: str) -> Path:
    """Return the path of the wheel with the tag of the glibc that it needs.

    Fails if a library needs a newer glibc, or anything else of the system.
    """
    tag = platform_tag(machine)
    # Libraries for newer CPUs are in the wheel on purpose: loraplex loads what a CPU can run.
    flags = ("--plat", tag, "--only-plat", "--disable-isa-ext-check", "--wheel-dir", target)
    run(
        *(sys.executable, "-m", "auditwheel", "repair", *flags, raw),
        folder=target,
        environment={"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"},
    )
    return target / raw.name.replace(f"linux_{machine}", tag)


def main() -> None:
    """Build into the folder that the command line names."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("target", type=Path, help="folder for the sdist and the wheels")
    for path in build(Path(__file__).parents[1], parser.parse_args().target.resolve()):
        print(f"{path.stat().st_size / 2**20:6.1f} MiB  {path.name}", flush=True)


if __name__ == "__main__":
    main()
