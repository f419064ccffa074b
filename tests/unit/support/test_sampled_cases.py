"""Cases that a run takes: some with each seed, all with all seeds; and parts of the slow tests."""

from types import SimpleNamespace

import pytest

from support.naming import naming
from support.sampled_cases import has_no_test, left_to_others, part_of_slow

NOT_SLOW = "not slow and not gpu"
CASES = {f"test_file.py::test_many[{case}]" for case in "abcdefgh"}
OTHERS = {"test_file.py::test_many", "test_file.py::test_few[a]", "test_file.py::test_few[b]"}


def items(names, *marks, marker="some"):
    markers = {marker: SimpleNamespace(args=marks)} if marks or marker == "slow" else {}
    return [SimpleNamespace(nodeid=name, get_closest_marker=markers.get) for name in sorted(names)]


def config_of(seed=0, *, markexpr=NOT_SLOW, args=("tests",), lf=False, slow_part=None):
    option = SimpleNamespace(markexpr=markexpr, randomly_seed=seed, lf=lf, slow_part=slow_part)
    return SimpleNamespace(args=args, option=option, getoption=vars(option).get)


def taken(seed=0, *, count=3, **options):
    config = config_of(seed, **options)
    collected = items(OTHERS) + items(CASES, count)
    left = {item.nodeid for item in left_to_others(config, collected)}
    assert left <= CASES
    assert left == {item.nodeid for item in left_to_others(config, collected[::-1])}
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
    config = config_of(3)
    more = {case.replace("many", "more") for case in CASES}
    left = [item.nodeid for item in left_to_others(config, items(CASES | more, 4))]
    assert len(left) == 8
    assert {name[-2] for name in left if "many" in name} == {
        name[-2] for name in left if "more" in name
    }


def test_the_parts_of_the_slow_tests_are_all_of_them_once():
    slow = items(CASES, marker="slow")
    found = []
    for part in ("1/3", "2/3", "3/3"):
        config = config_of(markexpr="not soak", slow_part=part_of_slow(part))
        left = left_to_others(config, slow + items(OTHERS))
        found += [item.nodeid for item in slow if item not in left]
    assert sorted(found) == sorted(CASES)


def test_a_run_with_a_part_of_the_slow_tests_takes_some_cases():
    assert len(taken(markexpr="not soak", slow_part=(1, 3))) == 3


@pytest.mark.parametrize("text", ["0/3", "4/3", "x", "1/0"])
def test_a_part_that_is_none(text):
    with pytest.raises(ValueError, match=naming("K/N", 1)):
        part_of_slow(text)


ONE_MARK = "import os\n\npytestmark = pytest.mark.slow\n\nX = 1\n"
SEVERAL_MARKS = """
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.gpu,
    pytest.mark.skipif(X is None, reason="[x]"),
]
"""
MARKS_OF_TESTS = """
pytestmark = pytest.mark.usefixtures("one_thread")

@pytest.mark.slow
def test_x(): ...
"""


@pytest.mark.parametrize("source", [ONE_MARK, SEVERAL_MARKS])
def test_a_file_with_an_excluded_mark_has_no_test_of_a_run(source):
    assert has_no_test(source, NOT_SLOW)
    assert has_no_test(source, "not soak and not slow and not gpu")
    assert not has_no_test(source, "not soak")
    assert not has_no_test(source, "")


@pytest.mark.parametrize("markexpr", ["slow", "not slow or gpu", "not (slow and gpu)", "gpu"])
def test_of_other_expressions_it_is_not_known(markexpr):
    assert not has_no_test(ONE_MARK, markexpr)


@pytest.mark.parametrize(
    "source", [MARKS_OF_TESTS, "", "# pytestmark = pytest.mark.slow", f"X = '''{ONE_MARK}'''"]
)
def test_marks_of_single_tests_do_not_count(source):
    assert not has_no_test(source, NOT_SLOW)
