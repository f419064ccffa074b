"""Names, tags, sizes and content of the distributions, and a run without a compiler."""

import email
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest
from packaging.metadata import Metadata
from packaging.utils import parse_sdist_filename, parse_wheel_filename

from loraplex import __version__
from support.native_selftest import check_report, run, selftest, without_compiler

ROOT = Path(__file__).parents[2]

LIBRARY_FOLDER = "loraplex/kernels/native/lib"
LIBRARIES = {
    "x86_64": {"libloraplex_generic.so", "libloraplex_v3.so", "libloraplex_v4.so"},
    "aarch64": {"libloraplex_generic.so", "libloraplex_neon.so"},
}
ELF_MACHINES = {"x86_64": 62, "aarch64": 183}
MOST_BYTES = 12 << 20
"""Twice what a wheel had when this was written."""
MOST_LIBRARY_BYTES = 4 << 20
"""A library with its debug information has 10 MiB."""


@pytest.fixture(params=sorted(LIBRARIES))
def machine(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def wheel(built: Path, machine: str) -> zipfile.ZipFile:
    (path,) = built.glob(f"*_{machine}.whl")
    return zipfile.ZipFile(path)


def package_files(names: Sequence[str], prefix: str = "") -> set[str]:
    start = f"{prefix}loraplex/"
    return {name.removeprefix(prefix) for name in names if name.startswith(start)}


def tracked_files() -> set[str]:
    listed = subprocess.check_output(["git", "ls-files", "src"], cwd=ROOT, text=True)
    return package_files(listed.splitlines(), "src/")


def test_names_and_sizes(built: Path):
    (sdist,) = built.glob("*.tar.gz")
    assert parse_sdist_filename(sdist.name)[0] == "loraplex"
    tags = set()
    for path in built.glob("*.whl"):
        name, version, _, wheel_tags = parse_wheel_filename(path.name)
        assert (name, str(version)) == ("loraplex", __version__)
        assert path.stat().st_size < MOST_BYTES
        tags |= {str(tag) for tag in wheel_tags}
    assert tags == {f"py3-none-manylinux_2_28_{machine}" for machine in LIBRARIES}
    assert sdist.stat().st_size < MOST_BYTES


def test_a_wheel_has_the_package_and_its_libraries_only(wheel: zipfile.ZipFile, machine: str):
    names = [name for name in wheel.namelist() if not name.endswith("/")]
    metadata = f"loraplex-{__version__}.dist-info/"
    assert {name for name in names if not name.startswith(("loraplex/", metadata))} == set()
    assert package_files(names) == tracked_files() | {
        f"{LIBRARY_FOLDER}/{name}" for name in LIBRARIES[machine]
    }


def test_libraries_are_of_the_machine_and_without_debug_information(
    wheel: zipfile.ZipFile, machine: str
):
    for name in (name for name in wheel.namelist() if name.endswith(".so")):
        content = wheel.read(name)
        assert content[:4] == b"\x7fELF"
        assert int.from_bytes(content[18:20], "little") == ELF_MACHINES[machine], name
        assert len(content) < MOST_LIBRARY_BYTES, name


def test_libraries_need_no_newer_glibc(wheel: zipfile.ZipFile):
    for name in (name for name in wheel.namelist() if name.endswith(".so")):
        needed = re.findall(rb"\0GLIBC_(\d+)\.(\d+)", wheel.read(name))
        assert needed, name
        assert max((int(major), int(minor)) for major, minor in needed) <= (2, 28), name


def test_metadata(wheel: zipfile.ZipFile, machine: str):
    folder = f"loraplex-{__version__}.dist-info"
    tag = email.message_from_bytes(wheel.read(f"{folder}/WHEEL"))
    assert tag["Root-Is-Purelib"] == "false"
    assert tag.get_all("Tag") == [f"py3-none-manylinux_2_28_{machine}"]
    metadata = Metadata.from_email(wheel.read(f"{folder}/METADATA"), validate=True)
    assert metadata.license_expression == "Apache-2.0"
    assert metadata.project_urls in (None, {})
    for name in metadata.license_files or ["none"]:
        assert wheel.read(f"{folder}/licenses/{name}")
    assert b"loraplex = loraplex.__main__:main" in wheel.read(f"{folder}/entry_points.txt")


def test_the_sdist_has_the_sources_and_nothing_built(built: Path):
    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = [member.name for member in archive.getmembers() if member.isfile()]
    root = f"loraplex-{__version__}/"
    assert package_files(names, f"{root}src/") == tracked_files()
    native = subprocess.check_output(["git", "ls-files", "native"], cwd=ROOT, text=True)
    others = {name.removeprefix(root) for name in names} - {f"src/{f}" for f in tracked_files()}
    single = {"CHANGELOG.md", "LICENSE", "PKG-INFO", "README.md", "pyproject.toml"}
    assert others == single | set(native.splitlines())


def test_selftest_of_every_library(wheel: zipfile.ZipFile, machine: str, tmp_path: Path):
    """Every op of the libraries that users get; those of another CPU in an emulator."""
    wheel.extractall(tmp_path)
    reports = selftest(tmp_path / LIBRARY_FOLDER, machine, tmp_path)
    assert set(reports) == LIBRARIES[machine]
    for report in reports.values():
        check_report(report)


def test_native_kernels_are_used_without_a_compiler(installed: Path):
    program = (
        "from loraplex.kernels.native.library import load_library; "
        "print(load_library().instruction_set)"
    )
    finished = subprocess.run(
        [installed / "bin" / "python", "-c", program],
        env=without_compiler(installed),
        cwd=installed,
        capture_output=True,
        text=True,
    )
    assert finished.returncode == 0, finished.stderr
    here = run(sys.executable, "-c", program).stdout
    assert finished.stdout.strip() == here.strip()
    assert finished.stdout.strip() != "generic"


def test_dependencies_agree(installed: Path):
    uv = Path(sys.executable).with_name("uv")
    checked = run(uv, "pip", "check", "--python", installed / "bin" / "python")
    assert checked.returncode == 0, checked.stdout


def test_generate_with_an_adapter(installed: Path):
    command = ("generate", "demo", r"美国的首都在哪里? \n答案:", "--max-tokens", "10")
    finished = subprocess.run(
        [installed / "bin" / "loraplex", *command],
        env=without_compiler(installed),
        cwd=installed,
        capture_output=True,
        text=True,
    )
    assert finished.returncode == 0, finished.stderr
    assert "华盛顿" in finished.stdout


def test_metadata_of_the_sdist_compiles_nothing(built: Path, tmp_path: Path):
    """pip's step "Preparing metadata" is short: a compiler that fails is not called."""
    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        archive.extractall(tmp_path, filter="data")
    program = (
        "import scikit_build_core.build as backend; "
        "backend.prepare_metadata_for_build_wheel('metadata')"
    )
    finished = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path / path.name.removesuffix(".tar.gz"),
        env={**os.environ, "CXX": str(shutil.which("false")), "LORAPLEX_NATIVE": "1"},
        capture_output=True,
        text=True,
    )
    assert finished.returncode == 0, finished.stderr
    assert [*tmp_path.rglob("METADATA")] != []


@pytest.mark.parametrize("required", [False, True])
def test_the_sdist_installs_without_kernels_where_no_compiler_works_and_they_are_optional(
    built: Path, tmp_path: Path, required: bool
):
    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        archive.extractall(tmp_path, filter="data")
    failing = shutil.which("false")
    assert failing is not None
    finished = subprocess.run(
        [
            *(sys.executable, "-c"),
            "import scikit_build_core.build as backend; backend.build_wheel('.')",
        ],
        cwd=tmp_path / path.name.removesuffix(".tar.gz"),
        env={
            **without_compiler(tmp_path),
            "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
            "CXX": failing,
            "LORAPLEX_NATIVE": str(int(required)),
        },
        capture_output=True,
        text=True,
    )
    wheels = [*(tmp_path / path.name.removesuffix(".tar.gz")).glob("*.whl")]
    if required:
        assert finished.returncode != 0
        assert wheels == []
    else:
        assert finished.returncode == 0, finished.stderr
        names = zipfile.ZipFile(wheels[0]).namelist()
        assert "loraplex/cli/main.py" in names
        assert [name for name in names if name.endswith(".so")] == []
