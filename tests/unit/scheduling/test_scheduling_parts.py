"""The small parts: settings, budget, slots, stop rules, queues, policy, queue bound."""

import pytest

from loraplex.core.errors import ConfigError
from loraplex.core.output import FinishReason
from loraplex.core.sampling_params import SamplingParams
from loraplex.core.sequence import Sequence, SequenceGroup
from loraplex.scheduling.active import ActiveRequest, ActiveSequence
from loraplex.scheduling.admission import QueueBound
from loraplex.scheduling.budget import StepBudget
from loraplex.scheduling.policy import PriorityThenArrival
from loraplex.scheduling.queues import RunningSet, WaitingQueue
from loraplex.scheduling.settings import SchedulerSettings
from loraplex.scheduling.slots import SlotPool
from loraplex.scheduling.stop import Stop, StopRules
from support.engine_requests import engine_request


def request(request_id=1, priority=0, arrival_ns=1, prompt=(1, 2, 3), eos=(0,), **sampling):
    return engine_request(
        prompt,
        SamplingParams(**sampling),
        request_id=request_id,
        eos_token_ids=eos,
        tenant="t",
        priority=priority,
        arrival_ns=arrival_ns,
    )


def sequence(token_ids=(1, 2, 3), num_prompt_tokens=3, index=0):
    return Sequence(1, index, list(token_ids), num_prompt_tokens, seed=0)


def active(handles=(), **values):
    group = SequenceGroup(request(**values), [sequence()], ())
    owner = ActiveRequest(group, handles, StopRules(group.request, 100))
    return ActiveSequence(owner, sequence(), PriorityThenArrival().key(group, sequence()))


@pytest.mark.parametrize(
    "values",
    [
        {"max_num_batched_tokens": 0},
        {"max_prefill_chunk": 0},
        {"max_queue_size": -1},
        {"max_queue_delay_ns": -1},
        {"adapter_aging_ns": -1},
    ],
)
def test_settings_name_the_bad_value(values):
    (name,) = values
    with pytest.raises(ConfigError, match=name):
        SchedulerSettings(**values)


def test_the_budget_of_a_plan_and_of_a_row():
    budget = StepBudget(10, max_prefill_chunk=4)
    assert budget.max_per_row == 4
    budget.spend(4)
    budget.spend(4)
    assert budget.num_left == 2


def test_budget_without_a_chunk_limit():
    assert StepBudget(10).max_per_row == 10


def test_the_lowest_free_slot_is_taken_and_left_slots_are_named_once():
    slots = SlotPool(3)
    assert [slots.allocate() for _ in range(4)] == [0, 1, 2, None]
    slots.release(2)
    slots.release(0)
    assert slots.allocate() == 0
    assert slots.take_removed() == (2, 0)
    assert slots.take_removed() == ()
    slots.remove_again((2,))
    assert slots.take_removed() == (2,)
    slots.check([0, 1])
    with pytest.raises(AssertionError):
        slots.check([0])


@pytest.mark.parametrize(
    ("sampling", "output", "expected"),
    [
        ({}, [7], None),
        ({}, [0], Stop(FinishReason.STOP, 0)),
        ({"ignore_eos": True}, [0], None),
        ({"stop_token_ids": (7,)}, [5, 7], Stop(FinishReason.STOP, 7)),
        ({"stop_token_ids": (7,), "ignore_eos": True}, [7], Stop(FinishReason.STOP, 7)),
        ({"max_tokens": 2}, [5], None),
        ({"max_tokens": 2}, [5, 6], Stop(FinishReason.LENGTH)),
        ({"max_tokens": 2}, [5, 0], Stop(FinishReason.STOP, 0)),
        ({"max_tokens": None}, [5, 6, 7], Stop(FinishReason.LENGTH)),
        ({"max_tokens": 50}, [5, 6, 7], Stop(FinishReason.LENGTH)),
        ({"min_tokens": 2}, [5, 0], None),
        ({"min_tokens": 2}, [5, 6, 0], Stop(FinishReason.STOP, 0)),
        ({"min_tokens": 2, "max_tokens": 2}, [5, 0], Stop(FinishReason.LENGTH)),
    ],
)
def test_stop_rules(sampling, output, expected):
    rules = StopRules(request(**sampling), max_model_len=6)
    assert rules.after(sequence([1, 2, 3, *output])) == expected


def test_stop_tokens_are_suppressed_only_with_min_tokens():
    assert StopRules(request(stop_token_ids=(9,)), 100).suppressed_token_ids == ()
    rules = StopRules(request(stop_token_ids=(9,), min_tokens=1), 100)
    assert rules.suppressed_token_ids == (0, 9)
    rules = StopRules(request(stop_token_ids=(9,), min_tokens=1, ignore_eos=True), 100)
    assert rules.suppressed_token_ids == (9,)


def test_max_tokens_is_bounded_by_the_model():
    assert StopRules(request(max_tokens=4), 100).max_tokens == 4
    assert StopRules(request(max_tokens=4), 5).max_tokens == 2
    assert StopRules(request(max_tokens=None), 100).max_tokens == 97


def test_priority_then_arrival():
    later = active(request_id=1, arrival_ns=9)
    sooner = active(request_id=2, arrival_ns=3)
    urgent = active(request_id=3, arrival_ns=50, priority=-1)
    assert sorted([later.key, sooner.key, urgent.key]) == [urgent.key, sooner.key, later.key]


def lanes_of(queue):
    """In the order of one pass."""
    scan = queue.scan()
    return list(iter(scan.next, None))


def test_lanes_are_in_the_order_of_their_heads():
    queue = WaitingQueue()
    a1 = active(handles=(1,), request_id=1, arrival_ns=1)
    a4 = active(handles=(1,), request_id=4, arrival_ns=4)
    b2 = active(handles=(2,), request_id=2, arrival_ns=2)
    base3 = active(request_id=3, arrival_ns=3)
    for waiting in (a4, base3, b2, a1):
        queue.add(waiting)
        queue.check()
    assert [lane.head for lane in lanes_of(queue)] == [a1, b2, base3]
    assert [len(lane) for lane in queue.lanes_with(1)] == [2]
    queue.remove(a1)
    queue.check()
    assert [lane.head for lane in lanes_of(queue)] == [b2, base3, a4]
    queue.remove(a4)
    queue.check()
    assert queue.lanes_with(1) == []
    assert set(queue) == {b2, base3}
    assert len(queue) == 2


def test_the_last_running_one_is_the_last_in_order():
    running = RunningSet()
    first, second = active(request_id=1), active(request_id=2)
    running.add(second)
    running.add(first)
    assert list(running) == [first, second]
    assert running.last is second
    running.remove(second)
    assert running.last is first
    assert len(running) == 1


def test_the_queue_bound_says_when_to_come_again():
    bound = QueueBound(2, max_num_seqs=1)
    for _ in range(3):
        assert bound.refusal(num_free_slots=1) is None
        bound.enter()
    refusal = bound.refusal(num_free_slots=1)
    assert refusal.code == "queue_full"
    assert refusal.message == "2 requests wait already; the queue holds 2"
    assert refusal.retry_after_seconds == 3.0
    for _ in range(100):
        bound.served(10**12)
    assert bound.refusal(num_free_slots=0).retry_after_seconds == 60.0
    bound.leave()
    assert bound.refusal(num_free_slots=1) is None
    bound.check(2)


def test_no_queue_bound():
    bound = QueueBound(0, max_num_seqs=1)
    bound.enter()
    assert bound.refusal(num_free_slots=0) is None
