"""A journal on disk: whole after a kill, bounded, and of one engine."""

import json
import math
import os
import stat

import pytest

from loraplex.core.errors import ConfigError
from loraplex.core.plan import RowAdded, StepPlan
from loraplex.core.sampling_params import MAX_LOGIT_BIAS, SamplingParams
from loraplex.core.scheduler_settings import SchedulerSettings
from loraplex.core.task import Generate
from loraplex.engine.journal import CommandTaken, JournalHeader, PlanMade
from loraplex.engine.journal_file import NUM_PARTS, JournalError, JournalFile, JournalReader
from loraplex.engine.messages import AddRequest, PreloadAdapter
from support.engine_requests import engine_request
from support.fake_runner import FAKE_CAPACITY
from support.naming import naming

HEADER = JournalHeader(
    loraplex="0",
    capacity=FAKE_CAPACITY,
    settings=SchedulerSettings(max_prefill_chunk=7),
    adapter_host_bytes=5,
    eviction_policy="lru",
)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "logs" / "steps.jsonl"


def journal(path, max_bytes=1 << 20):
    file = JournalFile(path, max_bytes)
    file.begin(HEADER)
    return file


def entries(path):
    return [line.entry for line in JournalReader(path)]


def test_what_was_written_is_read(path):
    file = journal(path)
    written = [CommandTaken(1, PreloadAdapter("a")), PlanMade(2)]
    for entry in written:
        file.write(entry)
    assert entries(path) == written, "nothing waits in a buffer"
    assert [line.number for line in JournalReader(path)] == [2, 3]
    assert JournalReader(path).header.settings == HEADER.settings
    assert JournalReader(path).header.capacity == FAKE_CAPACITY
    file.close()
    file.write(PlanMade(3))
    assert entries(path) == written, "a closed journal takes nothing"


def test_a_bias_of_minus_infinity_is_written_as_a_finite_one(path):
    """JSON has no infinity; the scheduler looks at no bias."""
    sampling = SamplingParams(logit_bias=((3, -math.inf), (7, 1.5)), max_tokens=4)
    request = engine_request((1,), sampling)
    row = RowAdded(
        0,
        1,
        Generate(sampling),
        0,
        token_ids=(1,),
        num_prompt_tokens=1,
    )
    file = journal(path)

    file.write(CommandTaken(1, AddRequest(request)))
    file.write(PlanMade(2, plan=StepPlan(1, added=(row,))))

    (command, plan) = entries(path)
    biases = ((3, -MAX_LOGIT_BIAS), (7, 1.5))
    assert command.command.request.sampling.logit_bias == biases
    assert plan.plan.added[0].sampling.logit_bias == biases
    command.command.request.sampling.validate()


def test_only_the_owner_may_read_it(path):
    journal(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_warning_at_the_start(path, caplog):
    journal(path)
    assert "tokens of every prompt" in caplog.text
    assert str(path) in caplog.text


def test_a_torn_last_line_is_left_out(path):
    file = journal(path)
    file.write(PlanMade(1))
    file.write(PlanMade(2))
    with path.open("rb+") as damaged:
        damaged.truncate(path.stat().st_size - 1)
    reader = JournalReader(path)
    assert [line.entry for line in reader] == [PlanMade(1)]
    assert reader.is_torn


def test_parts_follow_each_other(path):
    file = journal(path, max_bytes=NUM_PARTS * 2000)
    written = [PlanMade(index) for index in range(100)]
    for entry in written:
        file.write(entry)
    assert 2 < len(list(path.parent.iterdir())) <= NUM_PARTS
    assert max(part.stat().st_size for part in path.parent.iterdir()) <= 2000
    assert entries(path) == written
    names = [line.path.name for line in JournalReader(path)]
    assert names == sorted(names, reverse=True), "the oldest part has the highest number"


def test_the_oldest_part_goes(path):
    max_bytes = NUM_PARTS * 1500
    file = journal(path, max_bytes)
    for index in range(1000):
        file.write(PlanMade(index))
    parts = list(path.parent.iterdir())
    assert len(parts) == NUM_PARTS
    assert sum(part.stat().st_size for part in parts) <= max_bytes
    with pytest.raises(JournalError, match=r"part \d+ .* is not there: .* from its beginning"):
        JournalReader(path)


def test_an_engine_that_comes_back_moves_the_old_journal_aside(path):
    first = journal(path)
    first.write(PlanMade(1))
    first.close()
    second = journal(path)
    second.write(PlanMade(2))
    assert entries(path) == [PlanMade(2)]
    assert entries(path.with_name("steps.jsonl.1")) == [PlanMade(1)]


def test_an_old_journal_of_several_parts(path):
    first = journal(path, max_bytes=NUM_PARTS * 2000)
    written = [PlanMade(index) for index in range(60)]
    for entry in written:
        first.write(entry)
    first.close()
    journal(path)
    assert entries(path.with_name("steps.jsonl.1")) == written


def test_parts_of_another_engine_do_not_count(path):
    file = journal(path, max_bytes=NUM_PARTS * 2000)
    for index in range(60):
        file.write(PlanMade(index))
    file.close()
    journal(path.with_name("other.jsonl"))
    path.with_name("other.jsonl").replace(path.with_name("steps.jsonl.1"))
    with pytest.raises(JournalError, match=naming("steps.jsonl", "steps.jsonl.1")):
        JournalReader(path)


def test_two_engines_cannot_share_a_file(path):
    first = journal(path)
    with pytest.raises(ConfigError, match=naming("iteration_log", "models.NAME")):
        journal(path)
    first.close()
    journal(path)


def test_a_folder_that_cannot_be_written(path):
    path.mkdir(parents=True)
    with pytest.raises(ConfigError, match=naming("iteration_log", "steps.jsonl")):
        journal(path)


def test_a_full_disk_ends_the_journal_only(path, monkeypatch, caplog):
    file = journal(path)
    file.write(PlanMade(1))

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        file.write(PlanMade(2))
    file.write(PlanMade(3))
    assert entries(path) == [PlanMade(1)]
    assert "ends here: No space left on device" in caplog.text


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", ("line 1",)),
        ("[tool]\n", ("line 1",)),
        ('{"type": "plan", "now_ns": 1}\n', ("line 1", "header")),
        ("\xff\n", ("line 1",)),
    ],
)
def test_what_is_no_journal(tmp_path, text, named):
    path = tmp_path / "file"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(JournalError, match=naming(*named)):
        JournalReader(path)


def test_a_missing_file(tmp_path):
    with pytest.raises(JournalError, match=naming("nothing")):
        JournalReader(tmp_path / "nothing")


def test_a_broken_line_is_named(path):
    file = journal(path)
    file.write(PlanMade(1))
    file.close()
    with path.open("a") as damaged:
        damaged.write("nonsense\n")
    with pytest.raises(JournalError, match=naming("steps.jsonl", 3)):
        entries(path)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"version": 1}, ("version", 1, 5)),
        ({"settings": {"max_num_batched_tokens": 0}}, ("max_num_batched_tokens", 1, 0)),
        ({"capacity": None}, (1, "$.capacity")),
    ],
)
def test_headers_that_cannot_be_used(path, change, named):
    journal(path).close()
    header = json.loads(path.read_text())
    path.write_text(json.dumps({**header, **change}) + "\n")
    with pytest.raises(JournalError, match=naming(*named)):
        JournalReader(path)
