"""The budget of statements and lines, and what may raise it."""

import subprocess
import tomllib
from pathlib import Path

import pytest

from tools.check_budget import BUDGET, main, measure, statements

CORE = "src/loraplex/core"
MODULE = '"""Docstring."""\n\nFIRST = 1\n"""Another one."""\n\n\ndef f():\n    return FIRST\n'
PROJECT = "[tool.ruff]\nline-length = 100\n[tool.ruff.lint.mccabe]\nmax-complexity = 10\n"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return a checkout that is within its budget."""
    for path, text in {
        "pyproject.toml": PROJECT,
        f"{CORE}/module.py": MODULE,
        "src/loraplex/__init__.py": "from loraplex import core\n",
        "src/loraplex/kernels/cuda/programs/copy.py": "x = 1\ny = 2\n",
        "src/loraplex/frontends/console/static/main.js": "start();\n",
        "src/loraplex/frontends/console/static/vendor/large.js": "other();\n" * 100,
        "src/loraplex/demo/config.json": "{\n}\n",
        "native/src/add.cpp": "int add();\n",
        "native/tests/test_add.cpp": "int main();\n",
        "docs/tools/page.py": "PAGE = 1\n",
        "docs/adr/0001-planes.md": "# 1. Planes\n",
    }.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    main(tmp_path, ["--raise", *measure(tmp_path)])
    return tmp_path


def append(path: Path, text: str) -> None:
    path.write_text(path.read_text() + text)


def test_statements_are_counted_without_docstrings():
    assert statements(MODULE) == 3
    assert statements("if a:\n    b = 1\nelse:\n    for c in d: pass\n") == 4
    assert statements('class A:\n    """Text."""\n    x: int = 1\n    """Text."""\n') == 2


def test_what_counts_where(root):
    assert measure(root) == {
        "formatter": {"line-length": 100, "max-complexity": 10},
        CORE: {"statements": 3, "lines": 8},
        "src/loraplex/*": {"statements": 1, "lines": 1},
        "src/loraplex/kernels/cuda/programs": {"other_lines": 2},
        "src/loraplex/frontends": {"other_lines": 1},
        "native": {"other_lines": 1},
        "docs/tools": {"statements": 1, "lines": 1},
    }
    assert main(root, []) == 0


@pytest.mark.parametrize(
    ("path", "more", "found"),
    [
        (f"{CORE}/module.py", "f()\n", [f"{CORE}: 4 statements, 1 more than 3", "9 lines, 1 more"]),
        (f"{CORE}/module.py", "# A comment.\n", [f"{CORE}: 9 lines, 1 more than 8"]),
        (f"{CORE}/table.json", "{}\n", [f"{CORE}: 1 other lines, 1 more than 0"]),
        ("src/loraplex/new/part.py", "x = 1\n", ["src/loraplex/new: 1 statements, 1 more than 0"]),
        ("native/src/add.cpp", "int sum();\n", ["native: 2 other lines, 1 more than 1"]),
        (
            "src/loraplex/kernels/cuda/programs/copy.py",
            "z = 3\n",
            ["src/loraplex/kernels/cuda/programs: 3 other lines, 1 more than 2"],
        ),
        ("docs/tools/page.py", "OTHER = 2\n", ["docs/tools: 2 statements, 1 more than 1"]),
        ("pyproject.toml", "[tool.ruff.lint.pylint]\nmax-statements = 90\n", ["formatter: "]),
    ],
)
def test_more_than_the_budget_is_refused(root, capsys, path, more, found):
    (root / path).parent.mkdir(exist_ok=True)
    (root / path).touch()
    append(root / path, more)
    assert main(root, []) == 1
    printed = capsys.readouterr().out
    assert [each for each in found if each not in printed] == []
    assert "docs/adr" in printed


def test_statements_on_one_line_gain_nothing(root, capsys):
    (root / CORE / "module.py").write_text(MODULE.replace("FIRST = 1", "FIRST = 1; SECOND = 2"))
    assert main(root, []) == 1
    assert f"{CORE}: 4 statements, 1 more than 3" in capsys.readouterr().out


def test_write_lowers_and_never_raises(root):
    before = (root / BUDGET).read_text()
    append(root / CORE / "module.py", "f()\n")
    (root / "docs/tools/page.py").write_text("# Nothing.\n")
    (root / "native/src/add.cpp").unlink()
    assert main(root, ["--write"]) == 1
    written = tomllib.loads((root / BUDGET).read_text())
    assert written[CORE] == tomllib.loads(before)[CORE]
    assert written["docs/tools"] == {"statements": 0, "lines": 1}
    assert "native" not in written


def test_raise_takes_what_it_names(root, capsys):
    append(root / CORE / "module.py", "f()\n")
    append(root / "docs/tools/page.py", "OTHER = 2\n")
    assert main(root, ["--raise", CORE]) == 1
    assert CORE not in capsys.readouterr().out
    assert main(root, ["--raise", "docs/tools"]) == 0
    with pytest.raises(SystemExit):
        main(root, ["--raise", "src/loraplex/corn"])
    assert "src/loraplex/corn" in capsys.readouterr().err


def commit(root: Path) -> None:
    git = ["git", "-C", str(root), "-c", "user.name=a", "-c", "user.email=a@example.org"]
    subprocess.run([*git, "add", "--all"], check=True)
    subprocess.run([*git, "commit", "--quiet", "--message=change"], check=True)


@pytest.mark.parametrize("is_committed", [False, True])
def test_a_raise_needs_an_adr_in_the_same_commit(root, capsys, is_committed):
    subprocess.run(["git", "init", "--quiet", str(root)], check=True)
    commit(root)
    append(root / CORE / "module.py", "f()\n")
    main(root, ["--raise", CORE])
    if is_committed:
        commit(root)
    assert main(root, []) == 1
    printed = capsys.readouterr().out
    assert f"raises the budget of {CORE} without an ADR in docs/adr: 4 statements" in printed
    # One in the next commit is too late.
    append(root / "docs/adr/0001-planes.md", "Three lines more for core.\n")
    assert main(root, []) == is_committed


def test_lowering_needs_no_adr(root):
    subprocess.run(["git", "init", "--quiet", str(root)], check=True)
    commit(root)
    (root / CORE / "module.py").write_text("")
    assert main(root, ["--write"]) == 0
    commit(root)
    assert main(root, []) == 0


def test_what_git_ignores_does_not_count(root):
    """The native library is built in its folder."""
    subprocess.run(["git", "init", "--quiet", str(root)], check=True)
    (root / ".gitignore").write_text("native/CMakeFiles/\n")
    (root / "native/CMakeFiles").mkdir()
    (root / "native/CMakeFiles/made.cpp").write_text("int made();\n" * 100)
    assert main(root, []) == 0
    (root / "native/src/new.cpp").write_text("int added();\n")
    assert main(root, []) == 1
