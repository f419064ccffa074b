"""All that programs use is imported from `loraplex`, and examples and documentation do so."""

import ast
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

import loraplex
from loraplex.core import errors

ROOT = Path(__file__).parents[3]
DEEP = re.compile(r"^\s*(?:from\s+loraplex\.[\w.]+\s+import|import\s+loraplex\.)|'from loraplex\.")
PAGES = [
    *(ROOT / "examples").glob("*.py"),
    *ROOT.glob("*.md"),
    *(page for page in (ROOT / "docs").rglob("*.md") if "adr" not in page.parts),
]


def deep_imports(text: str) -> list[str]:
    return [line for line in text.splitlines() if DEEP.search(line)]


def imported_for_type_checkers() -> dict[str, str]:
    """Return the module of each name that `loraplex` imports only for type checkers."""
    tree = ast.parse(Path(loraplex.__file__).read_text(encoding="utf-8"))
    (block,) = (n for n in tree.body if isinstance(n, ast.If) and isinstance(n.test, ast.Name))
    return {
        alias.name: str(node.module)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


def test_type_checkers_and_programs_see_the_same_names() -> None:
    typed = imported_for_type_checkers()
    assert sorted([*typed, "__version__"]) == sorted(loraplex.__all__) == dir(loraplex)
    for name, module in typed.items():
        assert getattr(loraplex, name) is getattr(importlib.import_module(module), name)


def test_all_errors_that_users_see_are_public() -> None:
    tree = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, errors.LoraplexError)
    }
    assert tree - set(loraplex.__all__) == set()


def test_another_name_is_an_error() -> None:
    with pytest.raises(AttributeError, match="'Lama'"):
        _ = loraplex.Lama  # type: ignore[attr-defined]


def test_the_package_imports_nothing_heavy() -> None:
    program = "import sys, loraplex; print(*{name.partition('.')[0] for name in sys.modules})"
    found = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    heavy = {"torch", "numpy", "msgspec", "transformers", "tokenizers", "asyncio"}
    assert heavy & set(found.stdout.split()) == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_examples_and_pages_import_from_the_package(page: Path) -> None:
    assert deep_imports(page.read_text(encoding="utf-8")) == []


def test_deep_imports_are_found() -> None:
    lines = [
        "from loraplex.app.llm import LLM",
        "    import loraplex.core.errors",
        "python -c 'from loraplex.demo import BASE_PATH'",
    ]
    assert deep_imports("\n".join([*lines, "from loraplex import LLM", "import loraplex"])) == lines
