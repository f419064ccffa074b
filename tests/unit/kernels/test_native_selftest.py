"""The tests of the kernels in C++ (native/tests): on this CPU, and on aarch64 in an emulator."""

import os
from pathlib import Path

import pytest

from loraplex.kernels.native.library import LIBRARY_FOLDER
from support.native_selftest import CPU_CANNOT_RUN_IT, NATIVE, check_report, need, run, selftest

ALL_OF_AARCH64 = 4 | 256 | 512
"""LORAPLEX_CPU_NEON, _DOTPROD and _BF16 of abi.h: the emulator has them."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


def test_every_op_on_this_cpu(tmp_path: Path) -> None:
    """The libraries that are served, whose C functions the tests call."""
    reports = selftest(LIBRARY_FOLDER, os.uname().machine, tmp_path)
    assert reports["libloraplex_generic.so"].returncode != CPU_CANNOT_RUN_IT
    for report in reports.values():
        check_report(report)


def test_every_op_on_neon(tmp_path: Path) -> None:
    need("cmake", "aarch64-linux-gnu-g++", "qemu-aarch64")
    report = run(NATIVE / "tests" / "run_neon.sh", tmp_path)
    assert report.returncode != CPU_CANNOT_RUN_IT
    assert f"CPU features {ALL_OF_AARCH64:#x}\n" in report.stdout
    check_report(report)
