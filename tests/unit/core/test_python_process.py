"""No Python process that the product starts runs a module of the current folder."""

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from loraplex.compat.triton.export import Export
from loraplex.core.environment import child_environment, server_environment
from loraplex.core.python_process import module_command, with_safe_path

ROOT = Path(__file__).resolve().parents[3]
SOURCE = ROOT / "src" / "loraplex"
STARTERS = {"Popen", "run", "call", "check_call", "check_output", "create_subprocess_exec"}
UNKNOWN_STARTERS = re.compile(
    r"os\.((exec|spawn|posix_spawn)[lv]?p?e?|system|popen|fork)|.*create_subprocess_shell"
    r"|.*ProcessPoolExecutor|(torch\.)?multiprocessing\..*"
)
NAMES_OF_STARTERS = (
    r"\b(os|asyncio|subprocess|multiprocessing|create_subprocess_shell|ProcessPoolExecutor)\b"
)
"""Each call of them has one of these names."""
EXEMPT = {"bench/machine.py": "git", "testing/running_server.py": "commands of tests"}
SAFE_ENVIRONMENTS = {"child_environment()", "server_environment()"}
NAMES_PYTHON = {
    "core/python_process.py": "makes the command",
    "cli/triton.py": "default of a flag",
    "compat/triton/export.py": "default of a flag, for module_command",
}


def trees(names: str) -> Iterator[tuple[str, ast.Module]]:
    """Yield the files that have one of the names, the only ones that are worth parsing."""
    for path in sorted(SOURCE.rglob("*.py")):
        text = path.read_text()
        if re.search(names, text):
            yield path.relative_to(SOURCE).as_posix(), ast.parse(text)


def calls() -> Iterator[tuple[str, str, ast.Call]]:
    """Yield the file, the called name, and the call."""
    for file, tree in trees(NAMES_OF_STARTERS):
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                yield file, ast.unparse(node.func), node


def test_only_one_place_makes_the_command_of_a_python_process() -> None:
    found = {
        file for file, tree in trees(r"\bexecutable\b") if "sys.executable" in ast.unparse(tree)
    }
    assert found == set(NAMES_PYTHON)


def test_each_start_of_a_process_has_a_safe_environment() -> None:
    """Also those that the process starts in turn are safe then."""
    environments = {}
    for file, called, node in calls():
        assert not UNKNOWN_STARTERS.fullmatch(called), f"{file} calls {called}"
        owner, _, name = called.rpartition(".")
        is_start = owner in {"subprocess", "asyncio.subprocess", "asyncio"} and name in STARTERS
        if is_start and called != "asyncio.run" and file not in EXEMPT:
            keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            environments[file] = keywords.get("env")
    assert environments.pop("frontends/kserve/stub/server.py") == "environment"  # has own tests
    assert set(environments.values()) == SAFE_ENVIRONMENTS, environments
    assert len(environments) >= 7, "the walk does not find the places"


@pytest.mark.parametrize("folder", ["compat", "deploy"])
def test_shell_scripts_and_images_start_python_with_a_safe_path(folder: str) -> None:
    for path in (ROOT / folder).rglob("*"):
        if path.is_file() and path.suffix not in {".py", ".md"}:
            text = (
                path.read_text(errors="replace").replace('", "', " ").replace("\n        - ", " ")
            )
            text = re.sub(r"(?m)^#.*", "", text.replace('["', " "))
            assert not re.search(r"(?m)\bpython3? -[cm](?! venv)", text), path


def test_the_exported_command_of_a_server() -> None:
    command = Export(python="/x/python").command()
    assert command[:5] == ["/x/python", "-P", "-m", "loraplex", "compat"]


def test_module_command() -> None:
    assert module_command("a.b", "1") == (sys.executable, "-P", "-m", "a.b", "1")


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("/a:/b", "/a:/b"),
        (":/a", "/a"),
        ("/a::/b:", "/a:/b"),
        ("src", "src"),
        (":", None),
        ("", None),
        (None, None),
    ],
)
def test_empty_entries_of_the_search_path_are_dropped(given: str | None, kept: str | None) -> None:
    environment = {"OTHER": "x"} | ({} if given is None else {"PYTHONPATH": given})
    safe = with_safe_path(environment)
    assert safe.pop("PYTHONPATH", None) == kept
    assert safe == {"OTHER": "x", "PYTHONSAFEPATH": "1"}


def test_a_package_that_runs_from_its_own_folder_is_found_by_children(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is `cd src; python -m loraplex serve` in a checkout that is not installed."""
    monkeypatch.setattr(sys, "path", [str(SOURCE.parent), *sys.path])
    assert with_safe_path({"PYTHONPATH": "/a"})["PYTHONPATH"] == f"/a{os.pathsep}{SOURCE.parent}"


def test_both_environments_are_safe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep)
    monkeypatch.setenv("LORAPLEX_HTTP_PORT", "1")
    for environment in (child_environment(), server_environment()):
        assert environment["PYTHONSAFEPATH"] == "1"
        assert "PYTHONPATH" not in environment
    assert server_environment()["LORAPLEX_HTTP_PORT"] == "1"


@pytest.mark.parametrize("module", ["loraplex.adapters.staging_worker", "loraplex"])
def test_a_module_of_the_current_folder_does_not_run(tmp_path: Path, module: str) -> None:
    for name in ("http", "json", "email", "msgspec", "typer"):
        (tmp_path / f"{name}.py").write_text(f"raise SystemExit('{name} of the folder ran')")
    arguments = ["--help"] if module == "loraplex" else []
    result = subprocess.run(
        module_command(module, *arguments),
        cwd=tmp_path,
        env=child_environment(),
        input="",
        capture_output=True,
        text=True,
        check=False,
    )
    assert (result.returncode, result.stderr) == (0, "")
