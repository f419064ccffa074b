"""What `pip install .` does: metadata without a compilation, and a line for the user."""

import os
import pty
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from support.native_selftest import NATIVE, need

ROOT = NATIVE.parent


def test_metadata_needs_no_compilation() -> None:
    """An override `if.failed` leaves scikit-build-core no step for metadata: pip compiles in it."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    overrides = settings["tool"]["scikit-build"].get("overrides", [])
    assert [one for one in overrides if "failed" in str(one["if"])] == []


def configure(folder: Path, *flags: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run CMake as the build backend does."""
    need("cmake")
    return subprocess.run(
        ["cmake", "-S", NATIVE, "-B", folder, "-DSKBUILD_STATE=wheel", *flags],
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    ("reason", "variables"),
    [
        ("There is no C++ compiler", {"CXX": str(shutil.which("false"))}),
        ("LORAPLEX_NATIVE is 0", {"LORAPLEX_NATIVE": "0"}),
    ],
)
def test_without_a_compiler_no_kernels_are_built(
    tmp_path: Path, reason: str, variables: dict[str, str]
) -> None:
    finished = configure(tmp_path, **{"LORAPLEX_NATIVE": "", **variables})
    assert finished.returncode == 0, finished.stdout
    assert reason in " ".join(finished.stdout.split())
    assert subprocess.run(["cmake", "--build", tmp_path], check=False).returncode == 0
    assert [*tmp_path.rglob("*.so")] == []


def test_without_a_compiler_an_order_for_kernels_fails(tmp_path: Path) -> None:
    finished = configure(tmp_path, CXX=str(shutil.which("false")), LORAPLEX_NATIVE="1")
    assert finished.returncode != 0
    assert "LORAPLEX_NATIVE=1 wants the kernels" in " ".join(finished.stdout.split())


def test_a_terminal_shows_how_long_the_compilation_takes(tmp_path: Path) -> None:
    """pip shows nothing of a build: its output goes to a file, the line to the terminal."""
    need("cmake", "c++")
    command = ["cmake", "-S", str(NATIVE), "-B", str(tmp_path), "-DSKBUILD_STATE=wheel"]
    program = (
        "from subprocess import DEVNULL, run; "
        f"run({command}, stdout=DEVNULL, stderr=DEVNULL, check=True)"
    )
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(sys.executable, [sys.executable, "-c", program])
    shown = b""
    try:
        while piece := os.read(terminal, 1024):
            shown += piece
    except OSError:  # the other end is closed
        pass
    finally:
        os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0, shown.decode()
    assert b"compiling the CPU kernels" in shown
    assert b"seconds" in shown
