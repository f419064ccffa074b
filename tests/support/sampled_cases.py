"""Which cases of a test with many parameters a run of `make test` takes."""

import hashlib
from collections import defaultdict
from collections.abc import Sequence

import pytest

MARKER = "some"


def left_to_ci(config: pytest.Config, items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Return the items that a run without slow tests leaves out.

    Of each test marked `some(count)` it takes `count` cases: others with each seed of
    pytest-randomly, the same in every process of a run, and equal parameters for all tests of a
    file, which share what is made for them. All cases run in CI, where tests are named
    (`FILE::TEST`) and where those that failed run again (`--last-failed`).
    """
    is_named = any("::" in arg for arg in config.args) or getattr(config.option, "lf", False)
    if is_named or "not slow" not in config.option.markexpr:
        return []
    by_test = defaultdict[str, list[pytest.Item]](list)
    for item in items:
        if item.get_closest_marker(MARKER):
            by_test[item.nodeid.partition("[")[0]].append(item)
    seed = getattr(config.option, "randomly_seed", 0)
    return [item for cases in by_test.values() for item in _all_but_some(cases, seed)]


def _all_but_some(cases: list[pytest.Item], seed: int) -> list[pytest.Item]:
    def rank(item: pytest.Item) -> bytes:
        return hashlib.blake2b(f"{seed} {item.nodeid.partition('[')[2]}".encode()).digest()

    marker = cases[0].get_closest_marker(MARKER)
    assert marker is not None
    (count,) = marker.args
    return sorted(cases, key=rank)[count:]
