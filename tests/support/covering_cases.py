"""Which cases of a test with several parameters CI takes; `make soak` takes the others."""

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest

MARKER = "covering"


def mark_what_soak_takes(config: pytest.Config, items: Sequence[pytest.Item]) -> None:
    """Mark cases of tests marked `covering(strength)` as `soak`, except some that cover the values.

    With strength 1 each value of each parameter is in a case that stays, with strength 2 each pair
    of values of two parameters: nearly all bugs of a grid show with one value, or with a pair. All
    cases run where tests are named (`FILE::TEST`).
    """
    if any("::" in arg for arg in config.args):
        return
    by_test = defaultdict[tuple[str, int], list[Any]](list)
    for item in items:
        marker = item.get_closest_marker(MARKER)
        if marker and not item.get_closest_marker("soak"):
            (strength,) = marker.args
            by_test[item.nodeid.partition("[")[0], strength].append(item)
    for (_, strength), cases in by_test.items():
        kept = covering(cases, strength)
        for case in cases:
            if case not in kept:
                case.add_marker(pytest.mark.soak)


def covering(cases: Sequence[Any], strength: int) -> list[Any]:
    """Return cases with all values, or pairs of values, that any case has: always the same ones."""
    left = {case.nodeid: case for case in sorted(cases, key=lambda case: case.nodeid)}
    found = {name: set(_values(case.callspec.params, strength)) for name, case in left.items()}
    missing = set[tuple[_Value, ...]]().union(*found.values())
    kept = []
    while missing:
        best = max(left, key=lambda name: len(found[name] & missing))
        kept.append(left.pop(best))
        missing -= found[best]
    return kept


_Value = tuple[str, int]
"""Name of a parameter, and the identity of its value, which the cases share."""


def _values(params: Mapping[str, object], strength: int) -> Iterator[tuple[_Value, ...]]:
    values = [(name, id(value)) for name, value in sorted(params.items())]
    return itertools.combinations(values, min(strength, len(values)))
