import math

import pytest

from loraplex.frontends.kserve.statistics import (
    MAX_VALUES,
    WINDOW_SECONDS,
    Histogram,
    ModelCounts,
    RecentValues,
)


class Clock:
    def __init__(self):
        self.seconds = 0.0

    def __call__(self):
        return self.seconds


def test_quantiles_are_the_nearest_ranks():
    recent = RecentValues(Clock())
    for value in range(100, 0, -1):
        recent.add(value)
    assert recent.quantiles([0.5, 0.9, 0.99, 0.999, 0.001]) == [50, 90, 99, 100, 1]


def test_a_window_forgets():
    clock = Clock()
    recent = RecentValues(clock)
    recent.add(1)
    clock.seconds = WINDOW_SECONDS
    recent.add(3)
    assert recent.quantiles([0.5, 0.9]) == [1, 3]
    clock.seconds += 1
    assert recent.quantiles([0.5, 0.9]) == [3, 3]
    clock.seconds += WINDOW_SECONDS
    assert all(map(math.isnan, recent.quantiles([0.5, 0.9])))


def test_a_window_is_bounded():
    recent = RecentValues(Clock())
    for value in range(MAX_VALUES + 5):
        recent.add(value)
    assert recent.quantiles([1 / MAX_VALUES]) == [5]


def test_a_histogram_counts_up_to_its_bounds():
    histogram = Histogram((100.0, 500.0))
    for value in (1, 100, 100.5, 501):
        histogram.add(value)
    assert histogram.cumulative() == [("100.0", 2), ("500.0", 3), ("+Inf", 4)]
    assert histogram.sum == pytest.approx(702.5)


def test_each_duration_has_its_window():
    counts = ModelCounts((100.0,))
    counts.succeeded(1, 9_000, 1_000, (2_000, 3_000, 4_999))
    spans = ("success", "queue", "compute_input", "compute_infer", "compute_output")
    assert [counts.windows[span].quantiles([0.5]) for span in spans] == [[9], [1], [2], [3], [4]]
