"""Every promise of docs/promises.md, and every row of determinism, names tests that exist."""

import ast
import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "promises.md"
EXPLANATION = ROOT / "docs" / "explanation" / "determinism.md"
SUBJECTS = ("durability", "isolation", "determinism", "limits")
TEST = re.compile(r"`(tests/[\w/]+\.py)::([\w:]+)`")


def rows() -> list[list[str]]:
    """Return the cells of the table, row by row."""
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line[:1] == "|"]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[2:]]


@functools.cache
def names(file: str) -> frozenset[str]:
    """Return the functions and classes of a file, those of a class as `Class::function`."""
    found = set()
    for node in ast.parse((ROOT / file).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found.add(node.name)
            functions = (ast.FunctionDef, ast.AsyncFunctionDef)
            found |= {f"{node.name}::{f.name}" for f in node.body if isinstance(f, functions)}
    return frozenset(found)


def test_every_subject_has_promises() -> None:
    assert {row[0] for row in rows()} == set(SUBJECTS)


@pytest.mark.parametrize("row", rows(), ids=lambda row: row[1][:60])
def test_a_promise_has_its_tests(row: list[str]) -> None:
    _, _, condition, tests = row
    assert condition
    found = TEST.findall(tests)
    assert ", ".join(f"`{file}::{name}`" for file, name in found) == tests
    assert [f"{file}::{name}" for file, name in found if name not in names(file)] == []


def test_what_never_changes_an_output_has_its_tests() -> None:
    found = TEST.findall(EXPLANATION.read_text(encoding="utf-8"))
    assert len(found) >= 12
    assert [f"{file}::{name}" for file, name in found if name not in names(file)] == []
