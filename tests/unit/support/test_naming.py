"""Patterns for what a message names."""

import re

import pytest

from support.naming import naming


@pytest.mark.parametrize(
    ("values", "is_named"),
    [
        (("top_p", "(0, 1]", 2), True),
        ((2, "top_p"), True),
        ((), True),
        (("top_k", 2), False),
        (("top_p", 3), False),
        (("top", 2), False),
        ((25,), False),
        ((2, 0.5), True),
        ((2, 5), False),
    ],
)
def test_every_value_must_be_named_whole(values, is_named):
    message = "top_p must be in (0, 1], got 2\n(not 0.5, 2.5)"
    assert bool(re.search(naming(*values), message)) is is_named
