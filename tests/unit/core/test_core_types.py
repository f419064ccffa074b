"""The small rules that the plain types carry with them."""

import pytest

from loraplex.core.adapter import AdapterRef, ByDigest, ByName, ByTaskId, LoraTarget
from loraplex.core.clock import SystemClock
from loraplex.core.plan import PageGeometry, RowStep, StepPlan


@pytest.mark.parametrize(
    ("key", "text"),
    [
        (ByName("zh"), "adapter 'zh'"),
        (ByTaskId(0), "LoRA task 0"),
        (ByDigest("ab12"), "adapter with digest ab12"),
    ],
)
def test_a_reference_has_the_requested_name(key, text):
    assert str(AdapterRef("base", "default", key)) == text


def test_references_of_two_tenants_differ():
    assert AdapterRef("base", "a", ByName("zh")) != AdapterRef("base", "b", ByName("zh"))


@pytest.mark.parametrize(("rank", "slots"), [(1, 2), (8, 13), (16, 25)])
def test_a_target_takes_whole_slots(rank, slots):
    geometry = PageGeometry(slot_elements=64, slots_per_page=30)
    target = LoraTarget(0, "q_proj", rank, 64, 36)  # rank * 100 elements
    assert geometry.slots_of(target) == slots
    assert geometry.page_elements == 1920


def test_a_plan_counts_its_tokens():
    rows = (RowStep(slot=0, start=0, num_tokens=5), RowStep(slot=1, start=9, num_tokens=1))
    assert StepPlan(1, rows=rows).num_tokens == 6


def test_the_system_clock_is_monotonic_nanoseconds():
    clock = SystemClock()
    first, second = clock.now_ns(), clock.now_ns()
    assert isinstance(first, int)
    assert 0 <= second - first < 10**10
