"""What was charged within a minute, second by second."""

from loraplex.serving.access.sliding_window import SLOT_NS, WINDOW_NS, SlidingWindow

SECOND = 10**9


def test_a_charge_stays_for_a_whole_window():
    window = SlidingWindow()
    window.charge(5, 7)
    assert window.total(5 + WINDOW_NS) == 7
    assert window.total(SLOT_NS + WINDOW_NS - 1) == 7
    assert window.total(SLOT_NS + WINDOW_NS) == 0


def test_charges_of_one_second_are_one():
    window = SlidingWindow()
    first = window.charge(0, 1)
    assert window.charge(SECOND - 1, 2) is first
    assert window.charge(SECOND, 4) is not first
    assert window.total(SECOND) == 7


def test_a_correction_is_for_its_own_second():
    window = SlidingWindow()
    slot = window.charge(0, 10)
    window.charge(30 * SECOND, 5)
    window.correct(slot, -8)
    assert window.total(30 * SECOND) == 7
    assert window.total(61 * SECOND) == 5


def test_a_correction_after_the_window_changes_nothing():
    window = SlidingWindow()
    slot = window.charge(0, 10)
    assert window.total(61 * SECOND) == 0
    window.correct(slot, -8)
    assert window.total(61 * SECOND) == 0


def test_the_wait_until_there_is_capacity():
    window = SlidingWindow()
    assert window.seconds_until(0, 10, 10) == 0
    window.charge(0, 6)
    window.charge(10 * SECOND, 3)
    assert window.seconds_until(10 * SECOND, 1, 10) == 0
    assert window.seconds_until(10 * SECOND, 2, 10) == 51
    assert window.seconds_until(10 * SECOND, 8, 10) == 61
    assert window.seconds_until(20 * SECOND, 8, 10) == 51
    assert window.seconds_until(100 * SECOND, 10, 10) == 0


def test_memory_does_not_grow():
    window = SlidingWindow()
    for tenth in range(36_000):
        window.charge(tenth * SECOND // 10, 1)
    assert len(window._slots) <= 61
    assert window.total(3600 * SECOND) == 600
