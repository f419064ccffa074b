"""`loraplex doctor`: the machine, and a table of the kernels."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from loraplex.app import doctor
from loraplex.cli.main import app
from loraplex.execution.checking.checker import CheckFailed
from loraplex.execution.checking.verdict import Finding, Verdict
from loraplex.kernels.shadow import Fault
from support.tiny_model import TinyCheckpoint

SOUND = (
    Finding(op="linear", num_calls=3, difference=1.5e-3),
    Finding(op="repeat", num_calls=4),
)
WRONG = Finding(op="rotary", fault=Fault.WRONG, detail="differs by 0.5 of the largest number")


def verdict(*findings: Finding) -> Verdict:
    place = {"device": "a card", "driver": "580.1"}
    return Verdict(place=place, findings=findings, attention_backend="auto", seconds=3.0)


@pytest.fixture(autouse=True)
def small_copies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(doctor, "_COPY_BYTES", 1 << 10)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def run(monkeypatch: pytest.MonkeyPatch, found: Verdict | CheckFailed, *arguments: str):
    def find(*_: object, is_fresh: bool) -> Verdict:
        assert is_fresh
        if isinstance(found, CheckFailed):
            raise found
        return found

    monkeypatch.setattr(doctor, "find_verdict", find)
    return CliRunner().invoke(app, ["doctor", *arguments, "--device", "cpu"])


def test_a_sound_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    result = run(monkeypatch, verdict(*SOUND))
    assert result.exit_code == 0
    lines = [" ".join(line.split()) for line in result.output.splitlines()]
    assert "linear ok 3 1.5e-03" in lines
    assert "recorded steps ok 4 0" in lines
    assert "2 of 2 kernels agree with torch on a small model, checked in 3 s" in lines
    for name in ("processor", "instruction sets", "limit of open files", "copies in memory"):
        assert any(line.startswith(name) for line in lines), name


def test_a_kernel_that_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = TinyCheckpoint(tmp_path).folder
    result = run(monkeypatch, verdict(*SOUND, WRONG), str(folder))
    assert result.exit_code == 2
    assert f"2 of 3 kernels agree with torch on {folder}" in result.output
    line = "op rotary wrong: differs by 0.5 of the largest number (device a card, driver 580.1)"
    assert f"please report this line: {line}" in result.output


def test_json(monkeypatch: pytest.MonkeyPatch) -> None:
    result = run(monkeypatch, verdict(WRONG), "--json")
    assert result.exit_code == 2
    found = json.loads(result.output)
    assert found["verdict"]["findings"][0]["fault"] == "wrong"
    assert found["host"]["num_cores"] >= 1


def test_what_cannot_be_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    result = run(monkeypatch, CheckFailed("no memory"))
    assert result.exit_code == 2
    assert "the kernels could not be checked: no memory" in result.output


def test_a_server_with_the_same_state_directory_takes_the_result(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folders = []
    monkeypatch.setattr(doctor, "verdict_folder", lambda settings: folders.append(settings))
    run(monkeypatch, verdict(*SOUND), "--state-dir", str(tmp_path / "state"))
    assert [one.kernel_check_dir for one in folders] == [str(tmp_path / "state" / "kernels")]


@pytest.mark.slow
def test_a_real_check_of_the_small_model() -> None:
    result = CliRunner().invoke(app, ["doctor", "--device", "cpu", "--json"])
    assert result.exit_code == 0, result.output
    ops = {finding["op"] for finding in json.loads(result.output)["verdict"]["findings"]}
    assert ops >= {"linear", "add_lora", "paged_attention", "repeat", "draw_tokens"}
