"""Fetches what a machine with a GPU lacks: it has torch, triton, numpy, safetensors, transformers
and peft, with what these need, and no network.

    make gpu-wheels

Versions are those of constraints.txt, so that checks run there with what the tests run with here.
"""

import argparse
import re
import subprocess
import sys
from pathlib import Path

PACKAGES = (
    *("msgspec", "pyzmq", "llguidance", "prometheus_client", "protobuf"),
    *("pytest", "pluggy", "iniconfig", "pygments", "hypothesis", "sortedcontainers"),
)
"""Imports of loraplex's engine and tests/gpu in addition to those."""

GLIBC_MINORS = (17, 24, 26, 27, 28, 31, 34, 35, 39)
FOLDER = Path(".gpu/wheels")
_MOST_BYTES = 40 << 20


def versions(constraints: str) -> dict[str, str]:
    """Versions that the file pins; other packages get their newest versions."""
    pinned = dict(re.findall(r"^([A-Za-z0-9_.-]+)==([^\s;#]+)", constraints, re.MULTILINE))
    by_name = {_normal(name): version for name, version in pinned.items()}
    return {name: by_name[_normal(name)] for name in PACKAGES if _normal(name) in by_name}


def command(python: str, folder: Path, pins: dict[str, str]) -> list[str]:
    wanted = [f"{name}=={pins[name]}" if name in pins else name for name in PACKAGES]
    platforms = [f"--platform=manylinux_2_{minor}_x86_64" for minor in GLIBC_MINORS]
    return [
        *(sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"),
        *("--no-deps", "--only-binary=:all:", "--implementation=cp"),
        *(f"--python-version={python}", *platforms, "--platform=manylinux2014_x86_64"),
        *("--dest", str(folder), *wanted),
    ]


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--python", default="3.12", help="version, on the machine with the GPU")
    arguments = parser.parse_args()
    FOLDER.mkdir(parents=True, exist_ok=True)
    for old in FOLDER.glob("*.whl"):
        old.unlink()
    pins = versions(Path("constraints.txt").read_text())
    subprocess.run(command(arguments.python, FOLDER, pins), check=True)
    wheels = sorted(FOLDER.glob("*.whl"))
    size = sum(wheel.stat().st_size for wheel in wheels)
    print(f"{len(wheels)} wheels, {size / 2**20:.1f} MiB, in {FOLDER}")
    return size > _MOST_BYTES


if __name__ == "__main__":
    sys.exit(main())
