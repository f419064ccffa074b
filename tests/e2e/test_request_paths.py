"""A request's path to the scheduler's queue grows only on purpose."""

import pytest

from tools.request_paths import MARGIN, PATHS, measure, read_baseline, too_long


@pytest.mark.slow
def test_paths_are_no_longer_than_in_the_baseline():
    baseline = read_baseline()
    traces = measure()
    found = [line for kind in PATHS for line in too_long(kind, traces[kind], baseline)]
    assert not found, (
        "\n".join(found)
        + f"\nAt most {MARGIN} functions and files may be added to a path. If more "
        "are needed, write the baseline anew (python -m tools.request_paths --write) with an ADR."
    )
