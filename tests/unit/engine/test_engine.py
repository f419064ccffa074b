"""The engine as its loop sees it."""

import msgspec
import pytest

from loraplex.core.errors import AdapterNotFoundError, AdapterTooLargeError, DeviceLost
from loraplex.core.sampling_params import SamplingParams
from loraplex.engine.engine import LOAD_POLL_NS
from support.fake_engine import MILLISECOND_NS, FakeEngine
from support.fake_loader import fake_source
from support.fake_runner import FAKE_CAPACITY
from support.naming import naming


@pytest.fixture
def fakes():
    return FakeEngine()


def test_a_digest_keeps_its_handle(fakes):
    first = fakes.register("a")
    assert fakes.register("b") != first
    assert fakes.register("a") == first


def test_an_adapter_that_can_never_fit_is_refused(fakes):
    with pytest.raises(AdapterTooLargeError, match=naming(17, "lora_device_bytes")):
        fakes.register("huge", num_pages=17)
    with pytest.raises(AdapterTooLargeError, match="bytes"):
        fakes.register("huge", num_bytes=10**9)
    geometry = msgspec.structs.replace(FAKE_CAPACITY.page_geometry, slots_per_page=17)
    with pytest.raises(AdapterTooLargeError):
        fakes.engine.register_adapter(fake_source("long", geometry))


def test_forget(fakes):
    fakes.register("a")
    fakes.add([1], "a", max_tokens=3)
    fakes.step(3)
    fakes.engine.forget_adapter("a")
    assert fakes.register("a") == 1, "it was needed"
    fakes.run()
    fakes.engine.forget_adapter("a")
    assert fakes.loader.host == {}
    fakes.engine.forget_adapter("a")
    assert fakes.register("a") == 2


def test_unknown_adapters(fakes):
    request_id = fakes.add([1], "nobody's")
    fakes.run()
    error = fakes.completions[request_id].outputs[-1].error
    assert (error.code, "nobody's" in error.message) == ("adapter_not_found", True)
    with pytest.raises(AdapterNotFoundError):
        fakes.engine.preload("nobody's")


def test_a_request_that_can_never_be_computed_gets_an_error_output(fakes):
    request_id = fakes.add([1] * FAKE_CAPACITY.max_model_len)
    assert fakes.engine.next_wake_ns() is not None
    fakes.run()
    assert fakes.completions[request_id].error_code == "prompt_too_long"
    assert fakes.runner.plans == []


class ComparedToken(int):
    """Token of a prompt that nothing may look through while all requests wait."""

    def __lt__(self, other):
        pytest.fail("a step would wait until a long prompt is checked")

    __gt__ = __le__ = __ge__ = __lt__


def test_what_admission_has_checked_is_not_checked_again(fakes, monkeypatch):
    monkeypatch.setattr(SamplingParams, "validate", pytest.fail)
    request_id = fakes.add([ComparedToken(1), ComparedToken(2)], max_tokens=2)
    fakes.run()
    assert len(fakes.tokens(request_id)) == 2


def test_a_seed_is_given_to_those_without(fakes):
    request_id = fakes.add([1], sampling=SamplingParams(max_tokens=2))
    fakes.run()
    assert fakes.runner.plans[0].added[0].generation.seed == request_id


@pytest.mark.parametrize("early", [False, True])
def test_a_failed_step_ends_its_requests_only(fakes, early):
    fakes.register("a")
    fakes.loader.num_polls = 3
    in_step = [fakes.add(range(1, 40), max_tokens=9), fakes.add([2], max_tokens=9)]
    waiting = fakes.add([1], "a", max_tokens=3)
    fakes.step(2)
    fakes.runner.fail_step(early=early)
    fakes.step()
    for request_id in in_step:
        assert fakes.completions[request_id].error_code == "step_failed"
    fakes.run()
    assert fakes.tokens(waiting) == fakes.alone(waiting)
    again = fakes.add(range(1, 40), max_tokens=3)
    fakes.run()
    assert fakes.tokens(again) == fakes.alone(again)


@pytest.mark.parametrize("early", [False, True])
def test_a_copy_of_a_failed_step_is_started_again(fakes, early):
    fakes.register("a")
    fakes.add([1], max_tokens=9)
    fakes.step()
    waiting = fakes.add([1], "a", max_tokens=3)
    fakes.step()
    fakes.runner.fail_step(early=early)
    fakes.step()
    assert len(fakes.runner.plans[-1].adapter_copies) == 1
    fakes.run()
    assert fakes.tokens(waiting) == fakes.alone(waiting)


@pytest.mark.parametrize("early", [False, True])
def test_slots_that_a_failed_step_was_to_clear_can_be_taken(early):
    fakes = FakeEngine(msgspec.structs.replace(FAKE_CAPACITY, max_num_seqs=2))
    ends, fails = fakes.add([1], max_tokens=1), fakes.add([2], max_tokens=9)
    fakes.step()
    fakes.runner.fail_step(early=early)
    fakes.step()
    assert fakes.runner.plans[-1].removed == (0,)
    assert fakes.completions[fails].error_code == "step_failed"
    later = [fakes.add([3]), fakes.add([4])]
    fakes.run()
    for request_id in (ends, *later):
        assert fakes.tokens(request_id) == fakes.alone(request_id)


def test_any_exception_of_the_runner_is_a_failed_step(fakes, monkeypatch):
    request_id = fakes.add([1])

    def launch(plan):
        raise ZeroDivisionError("secret")

    with monkeypatch.context() as patch:
        patch.setattr(fakes.runner, "launch", launch)
        fakes.step()
    error = fakes.completions[request_id].outputs[-1].error
    assert error.code == "step_failed"
    assert "secret" not in error.message
    fakes.engine.check()


def test_a_lost_device_ends_the_engine(fakes, monkeypatch):
    """Then its process ends, and serving gives the requests to the next one."""
    request_id = fakes.add([1])

    def launch(plan):
        raise DeviceLost("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(fakes.runner, "launch", launch)
    with pytest.raises(DeviceLost, match="illegal memory access"):
        fakes.step()
    assert not fakes.completions[request_id].outputs, "output before the end"


def test_a_row_error_ends_all_sequences_of_its_request(fakes):
    fakes.runner.fail_rows()
    failed = fakes.add([1], sampling=SamplingParams(max_tokens=3, n=3))
    other = fakes.add([2])
    fakes.run()
    assert fakes.completions[failed].error_code == "row_failed"
    assert fakes.tokens(other) == fakes.alone(other)


def test_it_polls_loads_while_it_waits(fakes):
    fakes.register("a")
    fakes.loader.num_polls = 3
    fakes.add([1], "a")
    fakes.step()
    assert fakes.engine.next_wake_ns() == fakes.clock.now_ns() + LOAD_POLL_NS
    fakes.run()


def test_the_step_record(fakes):
    fakes.register("a")
    with_adapter = fakes.add([1, 2], "a", max_tokens=3)
    fakes.step(3)
    base = fakes.add([3, 4, 5], max_tokens=1)
    fakes.step()
    record = fakes.records[-1]
    assert record.request_ids == (with_adapter, base)
    assert (record.num_rows, record.num_prefill_rows, record.num_tokens) == (2, 1, 4)
    assert (record.num_adapters, record.adapter_pages_used) == (1, 1)
    assert (record.num_running, record.num_waiting, record.num_preempted) == (2, 0, 0)
    assert record.blocks_held == 2
    assert [r.adapter_copies_started for r in fakes.records] == [1, 0, 0]
    assert [r.step_id for r in fakes.records] == [1, 2, 3]
    assert all(r.duration_ns == 0 for r in fakes.records)
    fakes.run()


def test_stats_count_tokens(fakes):
    fakes.add([1, 2, 3], max_tokens=4)
    fakes.run()
    stats = fakes.engine.stats()
    assert (stats.steps, stats.prompt_tokens, stats.generation_tokens) == (4, 3, 4)
    assert stats.num_running == stats.num_waiting == stats.blocks_held == 0


def test_check_fails_if_something_is_lost(fakes):
    fakes.add([1, 2, 3])
    fakes.step()
    fakes.engine.check()
    fakes.engine._scheduler._state.kv.grow([[]], 1)
    with pytest.raises(AssertionError):
        fakes.engine.check()


def test_abort_of_what_is_gone_changes_nothing(fakes):
    request_id = fakes.add([1])
    fakes.run()
    fakes.engine.abort(request_id)
    fakes.engine.abort(99)
    assert fakes.engine.is_idle


def test_capacity_and_close(fakes):
    assert fakes.engine.capacity is fakes.runner.capacity()
    fakes.engine.close()
    assert fakes.runner.is_closed
    assert fakes.loader.is_closed


@pytest.mark.parametrize("failing", ["loader", "runner"])
def test_a_part_that_cannot_be_closed_leaves_no_other_open(fakes, monkeypatch, failing):
    """The runner of an engine of several ranks ends their processes."""
    part = getattr(fakes, failing)
    close = part.close

    def fail():
        close()
        raise OSError("planted")

    monkeypatch.setattr(part, "close", fail)
    with pytest.raises(OSError, match="planted"):
        fakes.engine.close()
    assert fakes.runner.is_closed
    assert fakes.loader.is_closed


def test_an_idle_engine_ends_by_deadline_what_waits_for_a_load(fakes):
    fakes.register("a")
    fakes.loader.num_polls = 100
    request_id = fakes.add([1], "a", timeout_ns=5 * MILLISECOND_NS)
    fakes.run()
    assert fakes.completions[request_id].error_code == "deadline_exceeded"


def test_an_adapter_that_is_to_be_forgotten_leaves_after_its_last_request():
    fake = FakeEngine()
    fake.register("d")
    request_id = fake.add((1, 2, 3), "d", max_tokens=4)
    fake.step(3)
    fake.engine.forget_adapter("d")
    fake.engine.forget_adapter("never known")
    assert fake.engine.adapter_activity().residency == {"d": "device"}
    fake.run()
    assert fake.tokens(request_id) == fake.alone(request_id)
    assert fake.engine.adapter_activity().residency == {}


def test_an_adapter_that_is_registered_again_meanwhile_stays():
    fake = FakeEngine()
    fake.register("d")
    fake.add((1, 2, 3), "d", max_tokens=4)
    fake.step(3)
    fake.engine.forget_adapter("d")
    fake.register("d")
    fake.run()
    assert fake.engine.adapter_activity().residency == {"d": "device"}


def test_a_preload_of_an_adapter_that_was_forgotten_is_dropped():
    fake = FakeEngine()
    fake.register("d")
    fake.engine.preload("d")
    fake.engine.forget_adapter("d")
    fake.run()
    assert fake.engine.adapter_activity().residency == {}
