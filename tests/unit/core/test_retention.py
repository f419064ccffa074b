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
from support.naming import naming, refused

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
    ("ranges", "named"),
    [
        ([TokenRangeRetention(0, 5), TokenRangeRetention(4, 9)], (0, 5, 4, 9)),
        ([TokenRangeRetention(9, 12), TokenRangeRetention(3)], (3, 9, 12)),
        ([TokenRangeRetention(-1, 5)], (-1,)),
        ([TokenRangeRetention(5, 5)], (5,)),
        ([TokenRangeRetention(0, 5, 101)], (0, 100, 101, 5)),
        ([TokenRangeRetention(0, 5, -1)], (0, 100, -1, 5)),
        ([TokenRangeRetention(0, 5, "9")], (0, 100, 9, 5)),
        ([TokenRangeRetention("0", 5)], (0, 5)),
        ([TokenRangeRetention(0, 5, 1, 0.5)], (0, 0.5)),
        ([TokenRangeRetention(0, 5, 1, -2)], (0, -2, 5)),
        ([TokenRangeRetention(i, i + 1) for i in range(257)], (257, 256)),
    ],
)
def test_a_retention_that_cannot_be_kept_is_refused(ranges, named):
    with pytest.raises(InvalidParameterError, match=naming(*named)) as caught:
        check_retention(KVRetention(tuple(ranges)))
    assert caught.value.param == "retention"


def test_the_decode_values_are_checked_too():
    with pytest.raises(InvalidParameterError, match=r"\(decode\): priority"):
        check_retention(KVRetention(decode_priority=200))
    with refused(InvalidParameterError, "long", param="retention"):
        check_retention("long")


def test_ranges_that_touch_are_no_overlap():
    check_retention(KVRetention((TokenRangeRetention(4, 9), TokenRangeRetention(0, 4))))
    check_retention(RETENTION)
