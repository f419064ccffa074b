"""The files that docs/how-to-add-a-task.md lists are those that know the task Pool."""

import ast
import re
from pathlib import Path

import loraplex

PACKAGE = Path(loraplex.__file__).parent
PAGE = Path(__file__).parents[3] / "docs" / "how-to-add-a-task.md"
KNOWS = re.compile(
    r"\b(Pool|PoolKind|PoolRequest|Pooler|Pooling|Pooled)\b(?! of)|Wanted\.POOL|\bpool_kinds\b"
)

NAMES = re.compile(r"\b(Pool|PoolKind|PoolRequest|Pooler|Pooling|Pooled|POOL|pool_kinds)\b")
"""Code that knows has one of these names in its text, and the others need not be parsed."""


def files_that_know_pools() -> set[str]:
    """Return the files whose code names the task, or a class of its own."""
    return {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if NAMES.search(text := path.read_text()) and KNOWS.search(code_of(text))
    }


def code_of(text: str) -> str:
    """Return the program without its texts and comments."""
    return ast.unparse(without_texts(ast.parse(text)))


def without_texts(tree: ast.Module) -> ast.Module:
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            node.value = ""
    return tree


def test_the_page_lists_the_files_that_a_task_touches() -> None:
    rows = re.findall(r"^\| `(\S+\.py)` \|", PAGE.read_text(), re.MULTILINE)
    assert files_that_know_pools() | {"scheduling/request.py"} == set(rows)


def test_the_files_of_the_page_are_there() -> None:
    for path in re.findall(r"`([a-z_]+/[^`<>]+\.py)`", PAGE.read_text()):
        root = PAGE.parents[1] if path.startswith("tests/") else PACKAGE
        assert (root / path).is_file(), path
