"""Which tests and cases a run leaves to others: those of a sample, those of a part, and files that
have none of its tests."""

import ast
import hashlib
import re
from collections import defaultdict
from collections.abc import Sequence

import pytest

MARKER = "some"
_ONLY_EXCLUDES = re.compile(r"not \w+( and not \w+)*")


def has_no_test(source: str, markexpr: str) -> bool:
    """Return whether a run needs no test of a file: the whole file has a mark that it excludes.

    Such a file need not be imported to find that. markexpr: as `pytest -m` takes it; of one that is
    more than `not A and not B` it is not known.
    """
    if "pytestmark = " not in source or not _ONLY_EXCLUDES.fullmatch(markexpr):
        return False
    excluded = {f"pytest.mark.{name}" for name in re.findall(r"not (\w+)", markexpr)}
    if not any(name in source for name in excluded):
        return False
    for statement in ast.parse(source).body:
        match statement:
            case ast.Assign([ast.Name("pytestmark")], value):
                marks = value.elts if isinstance(value, ast.List) else [value]
                return not excluded.isdisjoint(map(ast.unparse, marks))
    return False


def left_to_others(config: pytest.Config, items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Return the items that a run without slow tests, or with a part of them, leaves out.

    Of each test marked `some(count)` it takes `count` cases: others with each seed of
    pytest-randomly, the same in every process of a run, and equal parameters for all tests of a
    file, which share what is made for them. With `--slow-part=K/N` it takes the K-th of N parts of
    the slow tests. All run with `make test-all`, where tests are named (`FILE::TEST`) and with
    `--last-failed`.
    """
    is_named = any("::" in arg for arg in config.args) or getattr(config.option, "lf", False)
    part = config.getoption("slow_part")
    if is_named or (part is None and "not slow" not in config.option.markexpr):
        return []
    by_test = defaultdict[str, list[pytest.Item]](list)
    for item in items:
        if item.get_closest_marker(MARKER):
            by_test[item.nodeid.partition("[")[0]].append(item)
    seed = getattr(config.option, "randomly_seed", 0)
    left = [item for cases in by_test.values() for item in _all_but_some(cases, seed)]
    if part is not None:
        slow = [item for item in items if item.get_closest_marker("slow")]
        left += [item for item in slow if not _is_in(part, item)]
    return left


def part_of_slow(text: str) -> tuple[int, int]:
    """Read `K/N`, a part of the slow tests. Raises ValueError unless 1 <= K <= N."""
    number, _, total = (int(word) if word.isdigit() else 0 for word in text.partition("/"))
    if not 1 <= number <= total:
        raise ValueError(f"{text!r} is no part K/N with 1 <= K <= N")
    return number, total


def _is_in(part: tuple[int, int], item: pytest.Item) -> bool:
    number, total = part
    return int.from_bytes(_digest(item.nodeid)) % total == number - 1


def _all_but_some(cases: list[pytest.Item], seed: int) -> list[pytest.Item]:
    def rank(item: pytest.Item) -> bytes:
        return _digest(f"{seed} {item.nodeid.partition('[')[2]}")

    marker = cases[0].get_closest_marker(MARKER)
    assert marker is not None
    (count,) = marker.args
    return sorted(cases, key=rank)[count:]


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=8).digest()
