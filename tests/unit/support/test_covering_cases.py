"""Cases that CI takes of a test with several parameters: every pair of values, and few more."""

import itertools
from types import SimpleNamespace

import pytest

from support.covering_cases import covering, mark_what_soak_takes

SIZES = {"dtype": 3, "form": 5, "group": 6, "invariant": 2}


def case(**params):
    marks = []

    def closest(name):
        if name == "covering":
            return SimpleNamespace(args=(2,))
        return next((mark for mark in marks if mark.name == name), None)

    name = "-".join(map(str, params.values()))
    return SimpleNamespace(
        nodeid=f"test_file.py::test_many[{name}]",
        callspec=SimpleNamespace(params=params),
        marks=marks,
        add_marker=marks.append,
        get_closest_marker=closest,
    )


def grid(sizes):
    ranges = (range(size) for size in sizes.values())
    return [case(**dict(zip(sizes, values, strict=True))) for values in itertools.product(*ranges)]


def pairs(cases):
    return {
        pair
        for case in cases
        for pair in itertools.combinations(sorted(case.callspec.params.items()), 2)
    }


def names(cases):
    return {case.nodeid for case in cases}


def test_few_cases_have_every_pair_of_values():
    cases = grid(SIZES)
    kept = covering(cases, 2)
    assert pairs(kept) == pairs(cases)
    assert 5 * 6 <= len(kept) <= 1.3 * 5 * 6
    assert len(cases) == 180


def test_fewer_have_every_value():
    cases = grid(SIZES)
    kept = covering(cases, 1)
    assert len(kept) == max(SIZES.values())
    for name, size in SIZES.items():
        assert {case.callspec.params[name] for case in kept} == set(range(size))


def test_the_order_of_cases_does_not_matter():
    cases = grid(SIZES)
    assert names(covering(cases, 2)) == names(covering(cases[::-1], 2))


@pytest.mark.parametrize("sizes", [{"form": 7}, {"form": 7, "dtype": 3}], ids=str)
def test_there_is_nothing_to_leave_out_of_one_or_two_parameters(sizes):
    cases = grid(sizes)
    assert names(covering(cases, 2)) == names(cases)


def test_values_that_come_together_count_once():
    cases = [case(rows=i, columns=i, dtype=dtype) for i in range(4) for dtype in range(2)]
    assert names(covering(cases, 2)) == names(cases)


@pytest.mark.parametrize(
    ("args", "num_kept"), [(["tests"], 6), (["tests", "test_file.py::test_many"], 12)], ids=str
)
def test_soak_takes_the_others_of_a_test_that_is_not_named(args, num_kept):
    cases = grid({"a": 2, "b": 3, "c": 2})
    mark_what_soak_takes(SimpleNamespace(args=args), cases)
    assert sum(not case.marks for case in cases) == num_kept
    assert {mark.name for case in cases for mark in case.marks} <= {"soak"}


def test_a_case_that_soak_takes_anyway_covers_nothing():
    cases = grid({"a": 2, "b": 2})
    cases[3].marks.append(pytest.mark.soak)
    mark_what_soak_takes(SimpleNamespace(args=["tests"]), cases)
    assert [len(case.marks) for case in cases] == [0, 0, 0, 1]


def test_tests_without_the_marker_are_whole():
    cases = grid(SIZES)
    for each in cases:
        each.get_closest_marker = lambda _: None
    mark_what_soak_takes(SimpleNamespace(args=["tests"]), cases)
    assert not any(each.marks for each in cases)
