import pytest

from loraplex.core.clock import Clock
from loraplex.testing.fake_clock import FakeClock
from support.naming import naming


def test_stands_still_until_it_is_moved():
    clock: Clock = FakeClock(start_ns=7)
    assert clock.now_ns() == clock.now_ns() == 7
    clock.advance(3)
    assert clock.now_ns() == 10
    clock.advance_seconds(1.5)
    assert clock.now_ns() == 1_500_000_010


def test_does_not_go_back():
    with pytest.raises(ValueError, match=naming(1)):
        FakeClock().advance(-1)
