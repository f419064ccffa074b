"""Sizes that people read, and values that are enough."""

import pytest

from loraplex.core.byte_sizes import enough_bytes, parse_bytes


@pytest.mark.parametrize(
    ("num_bytes", "expected"),
    [
        (1, "1B"),
        (1024, "1KiB"),
        (1025, "1025B"),
        (100 << 20, "100MiB"),
        ((124 << 20) + 1, "125MiB"),
        (99 << 20, "99MiB"),
        (300 << 30, "300GiB"),
        (5 << 50, "5120TiB"),
    ],
)
def test_a_value_that_is_enough(num_bytes: int, expected: str) -> None:
    assert enough_bytes(num_bytes) == expected
    assert num_bytes <= parse_bytes(expected) <= num_bytes * 1.01
