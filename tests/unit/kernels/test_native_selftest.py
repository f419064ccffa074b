"""The tests of the kernels in C++ (native/tests): on this CPU, and on aarch64 in an emulator."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

_NATIVE = Path(__file__).parents[3] / "native"
_FEWEST_OPS = 20
_CPU_CANNOT_RUN_IT = 77

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


def need(*tools: str) -> None:
    if missing := [tool for tool in tools if shutil.which(tool) is None]:
        pytest.skip(f"there is no {' and no '.join(missing)}")


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def check_report(finished: subprocess.CompletedProcess[str]) -> None:
    assert finished.returncode == 0, finished.stdout
    assert len(re.findall(r" ok: 0 of \d+ checks failed", finished.stdout)) >= _FEWEST_OPS


def test_every_op_on_this_cpu(tmp_path: Path) -> None:
    need("cmake", "c++")
    options = ("-DCMAKE_BUILD_TYPE=Release", "-DLORAPLEX_SELFTEST=ON")
    for command in (
        ("cmake", "-S", _NATIVE, "-B", tmp_path, *options),
        ("cmake", "--build", tmp_path, "--parallel", "2"),
    ):
        built = run(*command)
        assert built.returncode == 0, built.stdout
    programs = sorted(tmp_path.glob("selftest_*"))
    reports = {program.name: run(program) for program in programs}
    assert reports["selftest_generic"].returncode == 0
    for report in reports.values():
        if report.returncode != _CPU_CANNOT_RUN_IT:
            check_report(report)


def test_every_op_on_neon(tmp_path: Path) -> None:
    need("cmake", "aarch64-linux-gnu-g++", "qemu-aarch64")
    check_report(run(_NATIVE / "tests" / "run_neon.sh", tmp_path))
