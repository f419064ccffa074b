"""Check that code and documents use plain technical English (docs/glossary.md).

Refuses docstrings that begin with a preposition, and the words that the glossary replaces:
in docstrings, comments, messages (string literals of at least four words), names, and the
prose of Markdown files. A line that quotes another system's own text ends with the comment
`# language: quoted`; a Markdown paragraph that does so stands in a code block.

    python docs/tools/check_language.py PATH ...             one line for each finding
    python docs/tools/check_language.py --count PATH ...     findings per folder
"""

import argparse
import ast
import collections
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

QUOTED = "language: quoted"
PREPOSITIONS = re.compile(
    r"\W*(of|as|with|for|in|on|at|by|from|to|without|behind|beside|under|over|between|among|against"
    r"|into|through|until|within|beyond|besides|whom|whose)\b(?!-)",
    re.I,
)
REPLACED: dict[str, str] = {
    r"guess(?:es|ed|ing)?": "draft token, speculative decoding",
    r"told|tells?|says?": "return, report, include, log",
    r"answer(?:s|ed|ing)?": "response, completion, output",
    r"ask(?:s|ed|ing)?|questions?": "request, prompt",
    r"whoever|whom": "which, the request that",
    r"rooms?|doors?": "package, module, entry point",
    r"seat(?:s|ed|ing)?": "admit",
    r"lanes?": "per-adapter queue",
    r"roster": "running and waiting requests",
    r"outbox(?:es)?": "output queue",
    r"(?:gives?|gave|given|giving) back": "free, release",
    r"heal(?:s|ed|ing)?": "repair",
    r"normal (?:form|file)s?": "canonical form, canonical adapter file",
    r"(?:what )?c[oa]mes? of it": "result, outcome",
    r"beside|behind": "alongside, in addition to, after",
    r"as many as|no more than": "maximum, limit",  # language: quoted
    r"in work|under way": "in-flight",
    r"nobody|somebody": "no request, another request",
    r"flights?": "in-flight step",
}
REPLACED_NAMES: dict[str, str] = {
    r"guess(?:es|ed|ing)?": "draft_tokens",
    r"told|tell|tells": "reported",
    r"answers?|answered": "response, completion, output",
    r"whoever|whom|who": "a noun",
    r"rooms?|doors?": "package, module",
    r"seat(?:s|ed)?": "admit",
    r"lanes?": "queue",
    r"roster": "requests",
    r"outbox": "output_queue",
    r"heal(?:s|ed)?": "repair",
    r"spelled": "formatted",
    r"became": "new_...",
    r"unless": "a name that states the condition",
    r"nobody|somebody": "none, other",
    r"flights?": "in_flight",
    r"asks?|asked|asking|questions?": "request",
}
_ALLOWED = re.compile(r"in[-_ ]?flight", re.I)
_PART = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")


def _alternatives(patterns: dict[str, str], form: str) -> re.Pattern[str]:
    """One expression whose last group, `x` and a number, names the pattern that matched."""
    groups = (f"(?P<x{i}>{form.format(pattern)})" for i, pattern in enumerate(patterns))
    return re.compile("|".join(groups), re.I)


_WORDS = _alternatives(REPLACED, r"(?<![-\w])(?:{})(?![-\w])")
_NAME_PARTS = _alternatives(REPLACED_NAMES, "^(?:{})$")


def _advice(patterns: dict[str, str], match: re.Match[str]) -> str:
    return list(patterns.values())[int((match.lastgroup or "x0")[1:])]


class Finding(NamedTuple):
    path: Path
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.text}"


def words_in(path: Path, line: int, text: str) -> Iterator[Finding]:
    """Replaced words of a text that begins at `line`."""
    for number, row in enumerate(text.splitlines()):
        for match in _WORDS.finditer(_ALLOWED.sub("", row)):
            yield Finding(path, line + number, f"{match[0]!r}: write {_advice(REPLACED, match)}")


def name_in(path: Path, line: int, name: str) -> Iterator[Finding]:
    """Replaced words of an identifier."""
    for part in _PART.findall(_ALLOWED.sub("", name)):
        if match := _NAME_PARTS.match(part):
            advice = _advice(REPLACED_NAMES, match)
            yield Finding(path, line, f"name {name!r}: write {advice}")


def docstring_start(path: Path, line: int, text: str) -> Iterator[Finding]:
    """The preposition that a docstring begins with."""
    if match := PREPOSITIONS.match(text):
        yield Finding(path, line, f"docstring begins with {match[1]!r}: use a verb or a noun")


def check_python(path: Path, source: str) -> Iterator[Finding]:
    """Findings in a Python file."""
    quoted = {number for number, row in enumerate(source.splitlines(), 1) if QUOTED in row}
    documents: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        lines = range(getattr(node, "lineno", 0), (getattr(node, "end_lineno", 0) or 0) + 1)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            documents.add(id(node.value))
            yield from docstring_start(path, node.lineno, str(node.value.value))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            is_text = id(node) in documents or node.value.count(" ") >= 3
            if is_text and quoted.isdisjoint(lines):
                yield from words_in(path, node.lineno, node.value)
        elif (name := _defined_name(node)) and quoted.isdisjoint(lines[:1]):
            yield from name_in(path, lines[0], name)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and token.start[0] not in quoted:
            yield from words_in(path, token.start[0], token.string)


def _defined_name(node: ast.AST) -> str | None:
    """The name that a node introduces."""
    match node:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return name
        case ast.arg(arg=name) | ast.Name(id=name, ctx=ast.Store()):
            return name
        case ast.Attribute(attr=name, ctx=ast.Store()):
            return name
    return None


def check_markdown(path: Path, source: str) -> Iterator[Finding]:
    """Findings in the prose of a Markdown file, outside code."""
    fenced = False
    for number, row in enumerate(source.splitlines(), 1):
        if row.lstrip().startswith("```"):
            fenced = not fenced
        elif not fenced and not row.startswith("    "):
            prose = re.sub(r"`[^`]*`|\]\([^)]*\)", " ", row)
            yield from words_in(path, number, prose)


def check(path: Path) -> Iterator[Finding]:
    source = path.read_text(encoding="utf-8")
    yield from (check_markdown if path.suffix == ".md" else check_python)(path, source)


def files_of(paths: list[Path]) -> Iterator[Path]:
    for path in paths:
        if path.is_dir():
            yield from sorted(file for file in path.rglob("*") if file.suffix in (".py", ".md"))
        else:
            yield path


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("paths", nargs="+", type=Path)
    parser.add_argument("--count", action="store_true")
    options = parser.parse_args()
    found = [finding for path in files_of(options.paths) for finding in check(path)]
    if options.count:
        folders = collections.Counter(str(finding.path.parent) for finding in found)
        rows = [*folders.most_common(), ("in all", len(found))]
        sys.stdout.writelines(f"{number:6} {folder}\n" for folder, number in rows)
    else:
        sys.stdout.writelines(f"{finding}\n" for finding in found)
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
