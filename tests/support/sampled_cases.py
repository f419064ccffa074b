"""Which tests and cases a run leaves to others: those of a sample, and those of a part."""

import hashlib
from collections import defaultdict
from collections.abc import Sequence

import pytest

MARKER = "some"


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
