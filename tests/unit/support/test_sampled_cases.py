"""Cases that a run of `make test` takes: some with each seed, all with all seeds together."""

from types import SimpleNamespace

import pytest

from support.sampled_cases import left_to_ci

NOT_SLOW = "not slow and not gpu"
CASES = {f"test_file.py::test_many[{case}]" for case in "abcdefgh"}
OTHERS = {"test_file.py::test_many", "test_file.py::test_few[a]", "test_file.py::test_few[b]"}


def items(names, *marks):
    marker = SimpleNamespace(args=marks) if marks else None
    return [
        SimpleNamespace(nodeid=name, get_closest_marker=lambda _: marker) for name in sorted(names)
    ]


def taken(seed=0, *, count=3, markexpr=NOT_SLOW, args=("tests",), lf=False):
    config = SimpleNamespace(
        args=args, option=SimpleNamespace(markexpr=markexpr, randomly_seed=seed, lf=lf)
    )
    collected = items(OTHERS) + items(CASES, count)
    left = {item.nodeid for item in left_to_ci(config, collected)}
    assert left <= CASES
    assert left == {item.nodeid for item in left_to_ci(config, collected[::-1])}
    return CASES - left


def test_each_seed_takes_as_many_and_all_seeds_take_all():
    chosen = [taken(seed) for seed in range(50)]
    assert {len(cases) for cases in chosen} == {3}
    assert set().union(*chosen) == CASES
    assert taken(7) == taken(7)


def test_a_count_above_the_number_of_cases_takes_all():
    assert taken(count=20) == CASES


@pytest.mark.parametrize(
    "run",
    [
        {"markexpr": "not soak"},
        {"markexpr": ""},
        {"args": ("test_file.py::test_many",)},
        {"lf": True},
    ],
    ids=str,
)
def test_ci_named_tests_and_failed_ones_are_whole(run):
    assert taken(**run) == CASES


def test_tests_of_a_file_share_their_parameters():
    config = SimpleNamespace(args=[], option=SimpleNamespace(markexpr=NOT_SLOW, randomly_seed=3))
    more = {case.replace("many", "more") for case in CASES}
    left = [item.nodeid for item in left_to_ci(config, items(CASES | more, 4))]
    assert len(left) == 8
    assert {name[-2] for name in left if "many" in name} == {
        name[-2] for name in left if "more" in name
    }
