"""The benchmark and the check of a GPU, on the processor with a tiny model: that they run."""

import contextlib
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from loraplex.core.environment import child_environment

_ROOT = Path(__file__).parents[3]
_THERE = ("torch", "triton", "numpy", "safetensors", "transformers", "peft")
"""Packages that a machine with a GPU has, with their dependencies."""
_BLOCKER = """
import importlib.metadata, sys
allowed = set({allowed!r})
owners = importlib.metadata.packages_distributions()
class Blocker:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        ours = top in ("loraplex", "gpu", "support")
        if top in owners and not ours and not allowed & set(owners[top]):
            raise ModuleNotFoundError(f"{{top}} is not on a machine with a GPU", name=top)
sys.meta_path.insert(0, Blocker())
import loraplex.app.engine, loraplex.app.llm, loraplex.kernels.cuda.backend
import gpu.bench, gpu.check, hypothesis, pytest
import importlib.util
for path in {files!r}:
    spec = importlib.util.spec_from_file_location("checked", path)
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
"""


def _with_needs(names: set[str]) -> set[str]:
    """The distributions, as their metadata name them, and those that they require."""
    found: dict[str, str] = {}
    wanted = sorted(names)
    while wanted:
        name = canonicalize_name(wanted.pop())
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            if name in found:
                continue
            distribution = importlib.metadata.distribution(name)
            found[name] = distribution.metadata["Name"]
            needs = map(Requirement, distribution.requires or ())
            is_needed = [need for need in needs if not need.marker or need.marker.evaluate()]
            wanted += [need.name for need in is_needed]
    return set(found.values())


def _run(*arguments: str) -> "subprocess.CompletedProcess[str]":
    paths = (f"{_ROOT}/{folder}" for folder in ("src", "benchmarks", "tests"))
    environment = child_environment() | {"PYTHONPATH": os.pathsep.join(paths)}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=_ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def _bench(part: str, output: Path, *flags: str) -> dict[str, Any]:
    done = _run("-m", "gpu.bench", part, "--tiny", "--output", str(output), *flags)
    assert done.returncode == 0, done.stderr
    assert "| " in done.stdout, "a table comes last"
    report: dict[str, Any] = json.loads(output.with_name(output.name + ".json").read_text())
    return report


@pytest.mark.slow
@pytest.mark.parametrize(("part", "num_cells"), [("a", 19), ("b", 9), ("c", 6), ("d", 5), ("e", 4)])
def test_a_part_measures_all_its_cells(part: str, num_cells: int, tmp_path: Path) -> None:
    report = _bench(part, tmp_path / "found")
    assert len(report["cells"]) == num_cells
    assert not report["left_out"]
    assert all(cell["figures"] for cell in report["cells"])
    assert report["header"]["place"]["versions"].keys() == {"torch", "cuda", "triton"}


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Part e, complete: the journal and the report."""
    output = tmp_path_factory.mktemp("e") / "found"
    report = _bench("e", output)
    return output.with_name("found.jsonl"), report


@pytest.mark.slow
def test_a_part_goes_on_where_it_was(measured: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    complete, first = measured
    journal = Path(shutil.copy(complete, tmp_path))
    lines = journal.read_text().splitlines(keepends=True)
    journal.write_text("".join(lines[:3]) + lines[3][:20])  # a crash within the third cell
    again = _bench("e", tmp_path / "found")
    assert again["cells"][:2] == first["cells"][:2]
    assert [cell["piece"] for cell in again["cells"]] == [0, 0, 1, 1]


@pytest.mark.slow
def test_a_journal_of_other_settings_is_refused(
    measured: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    shutil.copy(measured[0], tmp_path)
    done = _run("-m", "gpu.bench", "d", "--tiny", "--output", str(tmp_path / "found"))
    assert done.returncode != 0
    assert "remove it" in done.stderr


@pytest.mark.slow
def test_the_check_reports_what_failed(tmp_path: Path) -> None:
    tests = tmp_path / "tests"
    tests.mkdir()
    (tests / "test_a.py").write_text("def test_good(): pass\ndef test_bad(): assert 0\n")
    output = tmp_path / "check.json"
    done = _run(
        *("-m", "gpu.check", "--tiny", "--tests", str(tests), "--marker", "not gpu"),
        *("--output", str(output)),
    )
    assert done.returncode == 1, done.stderr
    report = json.loads(output.read_text())
    assert (report["tests"]["passed"], report["tests"]["failed"]) == (1, 1)
    assert report["tests"]["not_run"] == []
    assert done.stdout.splitlines()[-1].startswith("tests: 1 passed, 1 failed")


@pytest.mark.slow
def test_the_part_with_vllm_measures_ours(tmp_path: Path) -> None:
    report = _bench("f", tmp_path / "found")
    assert [cell["key"] for cell in report["cells"]] == [
        "loraplex base",
        "loraplex distinct r4 qkv",
    ]
    assert all("vllm" in reason for reason in report["left_out"].values())


@pytest.mark.slow
def test_what_the_wheels_do_not_bring_is_not_needed() -> None:
    wheels = _run("-c", "import gpu.wheels as w, sys; sys.stdout.write(' '.join(w.PACKAGES))")
    allowed = sorted(_with_needs({*_THERE, *wheels.stdout.split()}))
    files = [str(_ROOT / "tests/conftest.py")]
    files += [str(path) for path in sorted((_ROOT / "tests/gpu").glob("*.py"))]
    done = _run("-W", "ignore", "-c", _BLOCKER.format(allowed=allowed, files=files))
    assert done.returncode == 0, done.stderr[-3000:]
