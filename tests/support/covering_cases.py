"""Which cases of a test with several parameters CI takes; `make soak` takes the others."""

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest

MARKER = "pairs"


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
    left = {case.nodeid: case for case in sorted(cases, key=lambda case: case.nodeid)}
    pairs = {name: set(_pairs(case.callspec.params)) for name, case in left.items()}
    missing = set[tuple[_Value, ...]]().union(*pairs.values())
    kept = []
    while missing:
        best = max(left, key=lambda name: len(pairs[name] & missing))
        kept.append(left.pop(best))
        missing -= pairs[best]
    return kept


_Value = tuple[str, int]
"""Name of a parameter, and the identity of its value, which the cases share."""


def _pairs(params: Mapping[str, object]) -> Iterator[tuple[_Value, ...]]:
    values = [(name, id(value)) for name, value in sorted(params.items())]
    return itertools.combinations(values, min(2, len(values)))
