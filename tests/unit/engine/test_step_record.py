"""Records of steps."""

from collections import Counter

import msgspec

from loraplex.core.plan import RowResult, StepResult, StepTiming
from loraplex.core.scheduler_settings import SchedulerSettings
from loraplex.scheduling.report import MAX_ADAPTERS
from support.fake_engine import MILLISECOND_NS, FakeEngine
from support.fake_model import FakeModel
from support.fake_runner import FAKE_CAPACITY


def test_prefill_and_decode_rows():
    fakes = FakeEngine()
    fakes.add([1], max_tokens=5)
    fakes.step()
    fakes.add([2, 3, 4], max_tokens=5)
    fakes.step()
    record = fakes.records[-1]
    assert (record.num_rows, record.num_tokens, record.num_added) == (2, 4, 1)
    assert (record.num_prefill_rows, record.num_prefill_tokens) == (1, 3)
    assert record.num_new_tokens == 2


def test_adapters_by_digest():
    fakes = FakeEngine()
    for digest in "ab":
        fakes.register(digest)
    for digests in ("a", "a", "b", ""):
        fakes.add([1], *digests, max_tokens=9)
    fakes.step(4)
    assert fakes.records[-1].adapter_rows == {"a": 2, "b": 1}
    assert fakes.records[-1].num_base_rows == 1
    assert fakes.records[-1].num_adapters == 2


def test_kinds_of_rows_by_digest():
    fakes = FakeEngine(
        msgspec.structs.replace(FAKE_CAPACITY, num_adapter_pages=8),
        SchedulerSettings(num_draft_tokens=3),
        model=FakeModel(vocab_size=2),
    )
    for digest in "ab":
        fakes.register(digest)
    fakes.add([1], "a", max_tokens=30)
    fakes.step(6)
    drafting = fakes.records[-1]
    assert (drafting.draft_rows, drafting.prefill_rows) == ({"a": 1}, {})
    for digests in ("b", "ab", ""):
        fakes.add([1, 2], *digests, max_tokens=9)
    fakes.run()
    later = fakes.records[fakes.records.index(drafting) + 1 :]
    prefill = sum((Counter(record.prefill_rows) for record in later), Counter())
    assert prefill == {"": 1, "a": 1, "b": 2}
    for record in later:
        uses = Counter(record.adapter_rows) + Counter({"": record.num_base_rows})
        assert Counter(record.prefill_rows) <= uses
        assert Counter(record.draft_rows) <= uses
        assert record.num_base_rows <= record.num_rows


def test_of_many_adapters_those_with_the_most_rows():
    fakes = FakeEngine(msgspec.structs.replace(FAKE_CAPACITY, num_adapter_pages=40))
    digests = [f"d{index}" for index in range(40)]
    for digest in digests:
        fakes.register(digest)
    for start in range(0, 40, 8):
        fakes.add([1], *digests[start : start + 8], max_tokens=9)
    fakes.add([1], digests[-1], max_tokens=9)
    fakes.step(4)
    record = fakes.records[-1]
    assert (record.num_rows, record.num_adapters) == (6, 40)
    assert len(record.adapter_rows) == MAX_ADAPTERS
    assert record.adapter_rows[digests[-1]] == 2


def test_loads_and_copies():
    fakes = FakeEngine(num_polls=2)
    for digest in "ab":
        fakes.register(digest)
        fakes.add([1], digest, max_tokens=1)
    fakes.run()
    assert sum(record.adapter_loads_ended for record in fakes.records) == 2
    assert sum(record.adapter_copies_started for record in fakes.records) == 2
    assert sum(record.adapter_copies_ended for record in fakes.records) == 2


def test_failures():
    fakes = FakeEngine()
    fakes.runner.fail_rows()
    fakes.add([1], max_tokens=5)
    fakes.add([2], max_tokens=5)
    fakes.step()
    assert (fakes.records[-1].num_failed_rows, fakes.records[-1].num_rows) == (1, 2)
    fakes.runner.fail_step()
    fakes.step()
    assert (fakes.records[-1].num_failed_rows, fakes.records[-1].num_rows) == (1, 1)


class TimedStep:
    def __init__(self, fakes, result):
        self.fakes, self.result = fakes, result

    def wait(self):
        self.fakes.clock.advance(3 * MILLISECOND_NS)
        return self.result


def test_times(monkeypatch):
    fakes = FakeEngine()
    fakes.add([1], max_tokens=5)
    timing = StepTiming(prepare_ns=1, forward_ns=2, sample_ns=3)
    monkeypatch.setattr(
        fakes.runner,
        "launch",
        lambda plan: TimedStep(
            fakes, StepResult(plan.step_id, (RowResult(0, (7,)),), timing=timing)
        ),
    )
    fakes.step()
    record = fakes.records[-1]
    assert (record.timing, record.duration_ns) == (timing, 3 * MILLISECOND_NS)
    fakes.step()
    assert fakes.engine.stats().step_ns == 2 * 3 * MILLISECOND_NS
