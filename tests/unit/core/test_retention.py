"""Retention priorities of a request, and what follows for one block."""

import pytest

from loraplex.core.errors import InvalidParameterError
from loraplex.core.retention import (
    BlockRetention,
    KVRetention,
    TokenRangeRetention,
    block_retention,
    check_retention,
)

RETENTION = KVRetention(
    (TokenRangeRetention(8, None, 70, 1500), TokenRangeRetention(0, 4, 90)), 20, 30
)


def test_the_first_token_decides_about_a_block():
    assert block_retention(RETENTION, 0, 20) == BlockRetention(90, None)
    assert block_retention(RETENTION, 4, 20) is None
    assert block_retention(RETENTION, 8, 20) == BlockRetention(70, 1_500_000_000)
    assert block_retention(RETENTION, 16, 20) == BlockRetention(70, 1_500_000_000)
    assert block_retention(RETENTION, 20, 20) == BlockRetention(20, 30_000_000)


@pytest.mark.parametrize(
    ("ranges", "words"),
    [
        ([TokenRangeRetention(0, 5), TokenRangeRetention(4, 9)], "overlap: 0 to 5 and 4 to 9"),
        ([TokenRangeRetention(9, 12), TokenRangeRetention(3)], "overlap: 3 to the end and 9 to 12"),
        ([TokenRangeRetention(-1, 5)], "starts at -1"),
        ([TokenRangeRetention(5, 5)], "empty token range: 5 to 5"),
        ([TokenRangeRetention(0, 5, 101)], "priority must be 0 to 100, got 101"),
        ([TokenRangeRetention(0, 5, -1)], "priority must be 0 to 100, got -1"),
        ([TokenRangeRetention(0, 5, "9")], "priority must be 0 to 100, got '9'"),
        ([TokenRangeRetention("0", 5)], "other things than integers: 0 to 5"),
        ([TokenRangeRetention(0, 5, 1, 0.5)], "duration must be at least 0 ms, got 0.5"),
        ([TokenRangeRetention(0, 5, 1, -2)], "duration must be at least 0 ms, got -2"),
        ([TokenRangeRetention(i, i + 1) for i in range(257)], "257 token ranges; at most 256"),
    ],
)
def test_a_retention_that_cannot_be_kept_is_refused(ranges, words):
    with pytest.raises(InvalidParameterError, match=words) as caught:
        check_retention(KVRetention(tuple(ranges)))
    assert caught.value.param == "retention"


def test_the_decode_values_are_checked_too():
    with pytest.raises(InvalidParameterError, match=r"\(decode\): priority"):
        check_retention(KVRetention(decode_priority=200))
    with pytest.raises(InvalidParameterError, match="must be a KVRetention, got 'long'"):
        check_retention("long")


def test_ranges_that_touch_are_no_overlap():
    check_retention(KVRetention((TokenRangeRetention(4, 9), TokenRangeRetention(0, 4))))
    check_retention(RETENTION)
