"""Which cases of a test with several parameters CI takes; `make soak` takes the others."""

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

MARKER = "pairs"

Value = tuple[str, int]
"""Name of a parameter, and the index of its value."""


def mark_what_soak_takes(config: pytest.Config, items: Sequence[pytest.Item]) -> None:
    """Mark cases of tests marked `pairs` as `soak`, except a set that covers every pair of values.

    Most bugs of a grid show with one value of one parameter, nearly all others with a pair of
    values. Each parameter's values, and each two parameters' pairs of values, are in the set. All
    cases run where tests are named (`FILE::TEST`).
    """
    if any("::" in arg for arg in config.args):
        return
    by_test = defaultdict[str, list[Any]](list)
    for item in items:
        if item.get_closest_marker(MARKER):
            by_test[item.nodeid.partition("[")[0]].append(item)
    for cases in by_test.values():
        kept = covering(cases)
        for case in cases:
            if case not in kept:
                case.add_marker(pytest.mark.soak)


def covering(cases: Sequence[Any]) -> list[Any]:
    """Return cases with each pair of values that any case has: always the same ones."""
    left = {case.nodeid: (case, set(_pairs(case))) for case in sorted(cases, key=_place)}
    missing = set[tuple[Value, ...]]().union(*(pairs for _, pairs in left.values()))
    kept = []
    while missing:
        best = max(left, key=lambda name: len(left[name][1] & missing))
        case, pairs = left.pop(best)
        kept.append(case)
        missing -= pairs
    return kept


def _place(case: Any) -> tuple[list[Value], str]:
    return sorted(case.callspec.indices.items()), case.nodeid


def _pairs(case: Any) -> Iterator[tuple[Value, ...]]:
    values = sorted(case.callspec.indices.items())
    return itertools.combinations(values, min(2, len(values)))
