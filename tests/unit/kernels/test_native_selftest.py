"""The tests of the kernels in C++ (native/tests): on this CPU, and on aarch64 in an emulator."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from loraplex.kernels.native.library import LIBRARY_FOLDER

_NATIVE = Path(__file__).parents[3] / "native"
_FEWEST_OPS = 20
_CPU_CANNOT_RUN_IT = 77

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


def need(*tools: str) -> None:
    if missing := [tool for tool in tools if shutil.which(tool) is None]:
        pytest.skip(f"there is no {' and no '.join(missing)}")


def run(*command: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def check_report(finished: subprocess.CompletedProcess[str]) -> None:
    assert finished.returncode == 0, finished.stdout
    assert len(re.findall(r" ok: 0 of \d+ checks failed", finished.stdout)) >= _FEWEST_OPS


def test_every_op_on_this_cpu(tmp_path: Path) -> None:
    """The libraries that are served, whose C functions the tests call."""
    need("c++")
    compiler = ("c++", "-std=c++20", "-O1", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror")
    sources = sorted((_NATIVE / "tests").glob("*.cpp"))
    compiled = run(*compiler, f"-I{_NATIVE / 'include'}", "-c", *sources, cwd=tmp_path)
    assert compiled.returncode == 0, compiled.stdout
    reports = {}
    for library in LIBRARY_FOLDER.glob("libloraplex_*.so"):
        program = tmp_path / library.stem
        linked = run("c++", *tmp_path.glob("*.o"), library, "-pthread", "-o", program)
        assert linked.returncode == 0, linked.stdout
        reports[library.stem] = run(program)
    assert reports["libloraplex_generic"].returncode == 0
    for report in reports.values():
        if report.returncode != _CPU_CANNOT_RUN_IT:
            check_report(report)


def test_every_op_on_neon(tmp_path: Path) -> None:
    need("cmake", "aarch64-linux-gnu-g++", "qemu-aarch64")
    check_report(run(_NATIVE / "tests" / "run_neon.sh", tmp_path))
