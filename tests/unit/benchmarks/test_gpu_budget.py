"""The benchmark of a GPU keeps to its time, and names what it did not run: with clocks of tests."""

import json
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu.card import this_place
from gpu.check import Tests, run_tests
from gpu.journal import NO_TIME, Cell, CellJournal, Header
from gpu.rig import start_seconds

from gpu import bench, check, decode, loads, prefill, reference, traces, vllm_peer
from loraplex.bench.workload import PlannedRequest

CPU = torch.device("cpu")


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def work(self, seconds: float) -> Callable[[], dict[str, float]]:
        def take() -> dict[str, float]:
            self.now += seconds
            return {"seconds": seconds, "tokens_per_second": 1.0}

        return take


def journal(path: Path, clock: Clock, seconds: float) -> CellJournal:
    header = Header(place=this_place(CPU), settings={})
    return CellJournal(path / "found.jsonl", header, seconds, clock)


def test_figures_that_the_time_does_not_allow_are_left_out(tmp_path: Path) -> None:
    clock = Clock()
    found = journal(tmp_path, clock, 100.0)
    assert found.measure("a", clock.work(50), seconds=60)
    assert found.measure("b", clock.work(50), seconds=60) is None
    assert found.measure("c", clock.work(5), seconds=10)
    assert found.measure("d", clock.work(45), seconds=10)
    assert clock.now == 100.0
    assert found.measure("e", clock.work(1)) is not None
    assert found.left_out == {"b": NO_TIME}
    again = journal(tmp_path, Clock(), 100.0)
    assert again.measure("b", clock.work(1), seconds=60)
    assert not again.left_out


def test_figures_may_take_as_long_as_those_like_them(tmp_path: Path) -> None:
    clock = Clock()
    found = journal(tmp_path, clock, 100.0)
    assert found.measure("compiles", clock.work(60), seconds=10)
    assert found.measure("compiles, too", clock.work(60), seconds=10) is None
    assert found.measure("other", clock.work(30), seconds=30)
    assert clock.now == 90.0


def test_a_model_starts_only_if_there_is_time(tmp_path: Path) -> None:
    clock = Clock()
    found = journal(tmp_path, clock, 100.0)
    assert found.begins(["a", "b"], 100.0)
    found.add(Cell(key="a", figures={}))
    clock.now = 1.0
    assert not found.begins(["a", "b"], 100.0)
    assert found.left_out == {"b": NO_TIME}
    assert not found.begins(["a"], 0.0), "there is nothing to do"
    assert start_seconds(torch.device("cuda")) > 30


def part(run: Callable[[CellJournal], object]) -> types.SimpleNamespace:
    plan: dict[str, str] = {}
    return types.SimpleNamespace(
        __doc__="Part z: a test.",
        TINY=plan,
        FULL=plan,
        keys=lambda _: ["a", "b", "c"],
        run=lambda found, *_: run(found),
        table=lambda *_: "| a table |",
    )


def test_a_report_names_every_figure_that_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()

    def run(found: CellJournal) -> None:
        found.measure("a", clock.work(90), seconds=10)
        found.measure("b", clock.work(90), seconds=10)

    monkeypatch.setitem(bench.PARTS, "z", part(run))
    path = tmp_path / "z.jsonl"
    report = bench.run_part("z", CPU, path, tiny=True, seconds=100.0, clock=clock)
    assert [cell.key for cell in report.cells] == ["a"]
    assert report.left_out == {"b": NO_TIME, "c": "the part ended before"}
    shown = bench.show(report, path, tiny=True).splitlines()
    assert f"not run: b: {NO_TIME}" in shown
    assert "not run: c: the part ended before" in shown
    assert shown[-1] == "2 cells are left: run the part again."


def test_a_part_that_hangs_is_reported_with_what_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()

    def run(found: CellJournal) -> None:
        found.measure("a", clock.work(1))
        raise KeyboardInterrupt

    monkeypatch.setitem(bench.PARTS, "z", part(run))
    path = tmp_path / "z.jsonl"
    with pytest.raises(KeyboardInterrupt):
        bench.run_part("z", CPU, path, tiny=True, seconds=100.0, clock=clock)
    report = bench.expired("z", CPU, path, tiny=True)
    assert [cell.key for cell in report.cells] == ["a"]
    assert set(report.left_out) == {"b", "c"}
    assert set(report.left_out.values()) == {"the part did not end in time"}


@pytest.mark.parametrize("module", [decode, traces, reference, loads, prefill, vllm_peer])
def test_a_part_without_time_starts_nothing(module: Any, tmp_path: Path) -> None:
    """A start on a GPU takes longer than what is left."""
    found = journal(tmp_path, Clock(), -1.0)
    module.run(found, torch.device("cuda"), module.FULL)
    found.leave_out(module.keys(module.FULL), "not named")
    assert set(found.left_out) == set(module.keys(module.FULL))
    assert set(found.left_out.values()) == {NO_TIME}


def test_a_check_without_time_measures_nothing(tmp_path: Path) -> None:
    found, missing = journal(tmp_path, Clock(), -1.0), dict[str, str]()
    plan = check._DECODE
    work = lambda: check.measure(found, torch.device("cuda"), plan)  # noqa: E731
    assert check._measured(found, plan, work, missing) == {}
    assert missing == dict.fromkeys(check.keys(plan), NO_TIME)
    assert len(check.keys(plan)) == 20


def test_files_of_tests_are_run_until_the_time_is_over(tmp_path: Path) -> None:
    clock = Clock()
    for name in ("a", "b", "c"):
        (tmp_path / f"test_{name}.py").touch()
    given: list[float] = []

    def run_file(file: Path, seconds: float, marker: str, processes: int) -> Tests:
        del file, marker, processes
        given.append(seconds)
        clock.now += 60.0
        return Tests(passed=1, seconds=60.0)

    found = run_tests(tmp_path, 100.0, "gpu", 1, run_file=run_file, clock=clock)
    assert given == [100.0, 40.0]
    assert [Path(name).name for name in found.not_run] == ["test_c.py"]
    assert (found.passed, found.is_good) == (2, False)


class Fake:
    """Implements vllm_peer.Peer."""

    def __init__(self, folder: Path) -> None:
        self.config = json.loads((folder / "config.json").read_text())
        self.served: list[tuple[int, int]] = []
        self.is_closed = False

    def generate(self, requests: Sequence[PlannedRequest], adapters: Sequence[Path]) -> None:
        for adapter in adapters:
            assert (adapter / "adapter_model.safetensors").stat().st_size > 0
            assert json.loads((adapter / "adapter_config.json").read_text())["r"] == 4
        self.served.append((len(requests), len(adapters)))

    def close(self) -> None:
        self.is_closed = True


def with_ours(path: Path) -> CellJournal:
    found = journal(path, Clock(), 100.0)
    for key in reference.our_keys(vllm_peer.TINY):
        found.add(Cell(key=key, figures={"tokens_per_second": 30.0}))
    return found


def test_vllm_serves_the_same_requests(tmp_path: Path) -> None:
    found, opened = with_ours(tmp_path), list[Fake]()

    def open_peer(folder: Path, plan: reference.Plan) -> Fake:
        assert plan is vllm_peer.TINY
        opened.append(Fake(folder))
        return opened[0]

    vllm_peer.run(found, CPU, vllm_peer.TINY, open_peer)
    assert opened[0].is_closed
    assert opened[0].config["architectures"] == ["LlamaForCausalLM"]
    assert opened[0].served == [(3, 0)] * 4 + [(3, 3)] * 4
    assert not found.left_out
    assert set(found.cells) == set(vllm_peer.keys(vllm_peer.TINY))
    assert "| distinct r4 qkv | 30" in vllm_peer.table(found, vllm_peer.TINY)


def test_without_vllm_the_report_names_what_is_missing(tmp_path: Path) -> None:
    found = with_ours(tmp_path)

    def open_peer(folder: Path, plan: reference.Plan) -> Fake:
        raise vllm_peer.PeerMissing("vllm is not installed")

    vllm_peer.run(found, CPU, vllm_peer.TINY, open_peer)
    assert found.left_out == {
        "vllm base": "vllm is not installed",
        "vllm distinct r4 qkv": "vllm is not installed",
    }


def test_what_vllm_lacks_is_named(tmp_path: Path) -> None:
    missing = vllm_peer._what_is_missing
    absent = ModuleNotFoundError("No module named 'vllm'", name="vllm")
    assert missing(absent, tmp_path).startswith("vllm is not installed, and there is no wheel")
    (tmp_path / "vllm-0.20.0-cp312-cp312-linux_x86_64.whl").touch()
    assert missing(absent, tmp_path).startswith("vllm-0.20.0-cp312-cp312-linux_x86_64.whl in")
    other = ModuleNotFoundError("No module named 'cbor2'", name="cbor2")
    assert missing(other, tmp_path).startswith("vllm needs cbor2, which is not here")
