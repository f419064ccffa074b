"""`loraplex replay` over journals of a FakeEngine."""

import json
import re

import pytest
from typer.testing import CliRunner

from loraplex.cli.main import app
from loraplex.engine.journal_file import JournalFile
from support.fake_engine import FakeEngine
from support.naming import naming


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "steps.jsonl"
    fakes = FakeEngine(journal=JournalFile(path, 1 << 30))
    fakes.register("a")
    for _ in range(3):
        fakes.add([1, 2, 3], "a", max_tokens=4)
    fakes.step(3)
    fakes.runner.fail_step()
    fakes.step()
    fakes.add([1, 2, 3], max_tokens=4)
    fakes.run()
    fakes.engine.close()
    return path


def replay(*arguments):
    return CliRunner().invoke(app, ["replay", *map(str, arguments)])


def test_a_log_replays(path):
    result = replay(path)
    assert result.exit_code == 0, result.output
    assert "(1 failed), 4 requests, 0 aborts, 0 preemptions, 1 adapter loads" in result.stdout
    assert "every plan is the log's" in result.stdout
    assert "Traceback" not in result.output


def test_numbers_for_programs(path):
    result = replay(path, "--json", "--check-every", "2")
    summary = json.loads(result.stdout)
    assert (summary["requests"], summary["failed_steps"], summary["difference"]) == (4, 1, None)


def test_a_difference_is_reported_with_both_plans(path):
    text = path.read_text()
    tampered = text.replace('"num_tokens":3', '"num_tokens":2', 1)
    path.write_text(tampered)
    number = 1 + next(
        index
        for index, lines in enumerate(zip(text.splitlines(), tampered.splitlines(), strict=True))
        if lines[0] != lines[1]
    )
    result = replay(path)
    assert result.exit_code == 1
    assert f"steps.jsonl, line {number}: step " in result.stdout
    assert "plan.rows[0].num_tokens: 2 in the log, now 3" in result.stdout
    logged, planned = (
        json.loads(line.partition(": ")[2])
        for line in result.stdout.splitlines()
        if line.startswith(("in the log:", "planned:"))
    )
    assert logged["rows"][0]["num_tokens"] + 1 == planned["rows"][0]["num_tokens"]
    difference = json.loads(replay(path, "--json").stdout)["difference"]
    assert f"line {number}" in difference


def test_a_torn_line_is_said(path):
    path.write_bytes(path.read_bytes()[:-5])
    result = replay(path)
    assert result.exit_code == 0
    assert "the last line is torn" in result.stdout
    assert "the log ends within a step" in result.stdout


@pytest.mark.parametrize(
    ("text", "named"),
    [("hello\n", (1,)), ("", (1,))],
)
def test_no_log(tmp_path, text, named):
    path = tmp_path / "file"
    path.write_text(text)
    result = replay(path)
    assert result.exit_code == 2
    assert re.search(naming(*named), result.stderr)


def test_a_line_that_is_none(path):
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[:7], "nonsense\n", *lines[7:]]))
    result = replay(path)
    assert result.exit_code == 2
    assert re.search(naming(8), result.stderr)
