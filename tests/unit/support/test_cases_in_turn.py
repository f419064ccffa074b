"""Many cases in one test: each runs, with its own random numbers, and a failure names its case."""

import inspect

import pytest
import torch

from support.cases_in_turn import in_turn


def test_each_case_runs_with_the_fixtures_and_the_same_random_numbers():
    seen = []

    @in_turn("size", [1, 2])
    @in_turn("dtype, scale", [("a", 3), ("b", 4)])
    def check(library, size, dtype, scale):
        seen.append((library, size, dtype, scale, torch.rand(()).item()))

    assert [*inspect.signature(check).parameters] == ["library"]
    check(library="L")
    assert [case[:4] for case in seen] == [
        ("L", size, dtype, scale) for size in (1, 2) for dtype, scale in [("a", 3), ("b", 4)]
    ]
    assert len({case[4] for case in seen}) == 1


def test_a_failure_names_its_case():
    @in_turn("size", [1, 2, 3])
    def check(size):
        assert size != 2

    with pytest.raises(AssertionError) as raised:
        check()
    assert raised.value.__notes__ == ["with {'size': 2}"]


@in_turn("size", [1, 2])
@pytest.mark.parametrize("factor", [1, 2])
def test_other_parameters_are_pytest_s(size, factor, tmp_path):
    assert size * factor in (1, 2, 4)
    assert tmp_path.is_dir()
