"""Compare the size of the code with budget.toml (docs/adr/0055-budgets.md).

Python code counts by statements (of its syntax tree, without docstrings) and by lines, all other
files and Triton programs by lines. More than the budget is refused, and so are other settings of
the formatter. A commit that raises the budget adds or changes an ADR.

    python docs/tools/check_budget.py                   one line for each number that is too large
    python docs/tools/check_budget.py --write           lower the budget to what the code has
    python docs/tools/check_budget.py --raise NAME ...  set entries of the budget to what there is
"""

import argparse
import ast
import json
import subprocess
import sys
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
BUDGET = "budget.toml"
DECISIONS = "docs/adr"
FORMATTER = "formatter"
COUNTED = ("src/loraplex", "docs/tools", "native")
PROGRAMS = "src/loraplex/kernels/cuda/programs"
LEFT_OUT = (
    "src/loraplex/demo/",
    "src/loraplex/frontends/console/static/vendor/",
    "native/tests/",
)
"""Folders of which only Python counts: they have a model, copies of other projects, tests."""
BUILT = frozenset({".so", ".pyc"})
NUM_CHANGES = 10
"""Newest commits with a change of the budget, of which each is checked for an ADR."""
HEADER = """\
# Maximum size of the code (docs/adr/0055-budgets.md). `make lint` refuses more.
# Lower it to what the code has:           python docs/tools/check_budget.py --write
# Raise it, in one commit with an ADR:     python docs/tools/check_budget.py --raise NAME
"""

ADVICE = """\
The code exceeds budget.toml. Remove that much from the same package. If the code must stay, write
the reason into an ADR (docs/adr/0055-budgets.md, "Raises"), run `python docs/tools/check_budget.py
--raise NAME ...` with the names above, and commit all of it together.
"""

Entries = Mapping[str, Mapping[str, Any]]
"""Numbers by entry and name, and the settings of the formatter."""


def statements(source: str) -> int:
    """Return the number of statements of Python code, without docstrings."""
    return sum(
        isinstance(node, ast.stmt) and not _is_docstring(node)
        for node in ast.walk(ast.parse(source))
    )


def _is_docstring(node: ast.AST) -> bool:
    match node:
        case ast.Expr(value=ast.Constant(value=str())):
            return True
    return False


def entry_of(path: str) -> str:
    """Return the name of the entry that a file counts in."""
    if path.startswith(f"{PROGRAMS}/"):
        return PROGRAMS
    [root] = (root for root in COUNTED if path.startswith(f"{root}/"))
    if root != COUNTED[0]:
        return root
    package, *below = path.removeprefix(f"{root}/").split("/")
    return f"{root}/{package}" if below else f"{root}/*"


def measure(root: Path) -> dict[str, Mapping[str, Any]]:
    """Return what a checkout has, in the form of the budget."""
    found: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for path in _files(root):
        file = root / path
        entry, content = entry_of(path), file.read_bytes() if file.is_file() else b""
        lines = len(content.splitlines())
        if file.suffix == ".py" and entry != PROGRAMS:
            found[entry].update(statements=statements(content.decode()), lines=lines)
        elif file.suffix not in BUILT and not path.startswith(LEFT_OUT):
            found[entry].update(other_lines=lines)
    sizes = {entry: +numbers for entry, numbers in found.items() if +numbers}
    return {**sizes, FORMATTER: formatter(root)}


def _files(root: Path) -> list[str]:
    """Return the paths of counted folders, without what git ignores: native/ is built in place."""
    command = ("ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *COUNTED)
    if (listed := _git(root, *command)) is not None:
        return sorted(filter(None, listed.split("\0")))
    found = (file for folder in COUNTED for file in (root / folder).rglob("*"))
    return [file.relative_to(root).as_posix() for file in found]


def formatter(root: Path) -> dict[str, Any]:
    """Return the settings by which the same code has another number of lines or statements."""
    ruff = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["ruff"]
    lint = ruff.get("lint", {})
    widths = {name: ruff[name] for name in ("line-length", "indent-width") if name in ruff}
    tables = (ruff.get("format", {}), lint.get("mccabe", {}), lint.get("pylint", {}))
    return {**widths, **{name: value for table in tables for name, value in table.items()}}


def excesses(old: Entries, new: Entries) -> Iterator[tuple[str, str]]:
    """Yield each entry of which `new` has more than `old`, with a text that has the numbers."""
    for entry, numbers in new.items():
        allowed = old.get(entry, {})
        if entry == FORMATTER:
            if numbers != allowed:
                yield entry, f"{numbers} instead of {allowed}"
            continue
        for name, value in numbers.items():
            limit = allowed.get(name, 0)
            if value > limit:
                yield entry, f"{value} {name.replace('_', ' ')}, {value - limit} more than {limit}"


def undecided_raises(root: Path, present: str) -> Iterator[str]:
    """Yield the raises of the budget without an ADR; without git there is nothing to compare."""
    status = ("status", "--porcelain", "--untracked-files=all", "--", DECISIONS)
    if (changed := _git(root, *status)) is None:
        return
    head = _git(root, "show", f"HEAD:{BUDGET}")
    changes: list[tuple[str, str | None, str | None, str | None]] = [
        ("the working tree", head, present, changed)
    ]
    for commit in (_git(root, "log", f"-{NUM_CHANGES}", "--format=%h", "--", BUDGET) or "").split():
        before, after = (_git(root, "show", f"{each}:{BUDGET}") for each in (f"{commit}^", commit))
        files = _git(root, "show", "--format=", "--name-only", commit, "--", DECISIONS)
        changes.append((f"commit {commit}", before, after, files))
    for place, before, after, decisions in changes:
        if before and after and not decisions:
            for entry, text in excesses(tomllib.loads(before), tomllib.loads(after)):
                yield f"{place} raises the budget of {entry} without an ADR in {DECISIONS}: {text}"


def _git(root: Path, *arguments: str) -> str | None:
    """Return the output of a git command, or None if it fails."""
    command = ["git", "-C", str(root), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return done.stdout if done.returncode == 0 else None


def lowered(budget: Entries, measured: Entries) -> dict[str, Mapping[str, Any]]:
    """Return the budget without what the code no longer has."""
    return {
        entry: numbers
        if entry == FORMATTER
        else {name: min(value, measured[entry].get(name, 0)) for name, value in numbers.items()}
        for entry, numbers in budget.items()
        if entry in measured
    }


def written(budget: Entries) -> str:
    """Return the text of budget.toml."""
    rows = []
    for entry in sorted(budget.keys() - {FORMATTER}):
        numbers = ", ".join(f"{name} = {value}" for name, value in budget[entry].items())
        rows.append(f'"{entry}" = {{ {numbers} }}')
    rows += ["", f"[{FORMATTER}]"]
    rows += [f"{name} = {json.dumps(value)}" for name, value in budget.get(FORMATTER, {}).items()]
    return "\n".join([HEADER, *rows, ""])


def main(root: Path, arguments: Sequence[str]) -> int:
    about, _, usage = (__doc__ or "").partition("\n\n")
    formatted = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=about, epilog=usage, formatter_class=formatted)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--raise", dest="raised", nargs="+", metavar="NAME", default=[])
    options = parser.parse_args(arguments)
    path, measured = root / BUDGET, measure(root)
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    budget: dict[str, Mapping[str, Any]] = tomllib.loads(text)
    if unknown := sorted({*options.raised} - measured.keys()):
        parser.error(f"no code counts as {', '.join(unknown)}; there are {', '.join(measured)}")
    if options.write or options.raised:
        budget = (lowered(budget, measured) if options.write else budget) | {
            name: measured[name] for name in options.raised
        }
        path.write_text(written(budget), encoding="utf-8")
    over = [f"{entry}: {text}" for entry, text in excesses(budget, measured)]
    found = [*over, *undecided_raises(root, written(budget))]
    sys.stdout.writelines(f"{each}\n" for each in found)
    if over:
        sys.stdout.write(ADVICE)
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(ROOT, sys.argv[1:]))
