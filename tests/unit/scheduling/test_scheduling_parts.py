"""Small parts: settings, budget, slots, stop rules, queues, scheduling order, queue bound."""

import re

import pytest

from loraplex.core.errors import ConfigError
from loraplex.core.output import FinishReason
from loraplex.core.sampling_params import SamplingParams
from loraplex.core.scheduler_settings import SchedulerSettings
from loraplex.scheduling.plan_builder import StepBudget
from loraplex.scheduling.queues import QueueBound, WaitingQueue
from loraplex.scheduling.request import Request, Sequence, Stop, StopRules
from loraplex.scheduling.running import RunningSet, SlotPool
from support.engine_requests import engine_request
from support.naming import naming


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


def sequence(handles=(), **values):
    engine_request = request(**values)
    adapters = tuple((handle, 1.0) for handle in handles)
    owner = Request(engine_request, adapters, StopRules(engine_request, 100))
    return Sequence(owner, 1, 0, [1, 2, 3], 3, seed=0)


@pytest.mark.parametrize(
    "values",
    [
        {"max_num_batched_tokens": 0},
        {"max_prefill_chunk": 0},
        {"max_queue_size": -1},
        {"max_queue_delay_microseconds": -1},
        {"adapter_aging_seconds": -1},
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
    assert rules.after([1, 2, 3, *output], 3) == expected


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
    later = sequence(request_id=1, arrival_ns=9)
    sooner = sequence(request_id=2, arrival_ns=3)
    urgent = sequence(request_id=3, arrival_ns=50, priority=-1)
    assert sorted([later.key, sooner.key, urgent.key]) == [urgent.key, sooner.key, later.key]


def queues_of(waiting):
    """Return the queues in the order of one pass."""
    scan = waiting.scan()
    return list(iter(scan.next, None))


def test_queues_are_in_the_order_of_their_heads():
    queue = WaitingQueue()
    a1 = sequence(handles=(1,), request_id=1, arrival_ns=1)
    a4 = sequence(handles=(1,), request_id=4, arrival_ns=4)
    b2 = sequence(handles=(2,), request_id=2, arrival_ns=2)
    base3 = sequence(request_id=3, arrival_ns=3)
    for waiting in (a4, base3, b2, a1):
        queue.add(waiting)
        queue.check()
    assert [one.head for one in queues_of(queue)] == [a1, b2, base3]
    assert [len(one) for one in queue.by_handle[1]] == [2]
    queue.remove(a1)
    queue.check()
    assert [one.head for one in queues_of(queue)] == [b2, base3, a4]
    queue.remove(a4)
    queue.check()
    assert 1 not in queue.by_handle
    assert set(queue) == {b2, base3}
    assert len(queue) == 2


def test_the_last_running_one_is_the_last_in_order():
    running = RunningSet()
    first, second = sequence(request_id=1), sequence(request_id=2)
    running.add(second)
    running.add(first)
    assert list(running) == [first, second]
    assert running.last is second
    running.remove(second)
    assert running.last is first
    assert len(running) == 1


def test_the_queue_bound_gives_a_retry_time():
    bound = QueueBound(2, max_num_seqs=1)
    for _ in range(3):
        assert bound.refusal(lambda: 1) is None
        bound.num_queued += 1
    refusal = bound.refusal(lambda: 1)
    assert refusal.code == "queue_full"
    assert re.search(naming(2), refusal.message)
    assert refusal.retry_after_seconds == 3.0
    for _ in range(100):
        bound.served(10**12)
    assert bound.refusal(lambda: 0).retry_after_seconds == 60.0
    bound.num_queued -= 1
    assert bound.refusal(lambda: 1) is None
    bound.check(2)


def test_no_queue_bound():
    bound = QueueBound(0, max_num_seqs=1)
    bound.num_queued += 1
    assert bound.refusal(pytest.fail) is None


def test_free_slots_are_counted_only_for_a_long_queue():
    """It is needed for each request that arrives, and looks at every waiting adapter."""
    bound = QueueBound(2, max_num_seqs=1)
    bound.num_queued += 1
    assert bound.refusal(pytest.fail) is None
