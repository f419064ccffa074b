"""Progress of a benchmark, where standard error is no terminal and where it is one."""

import io
import sys
import threading

import pytest

from loraplex.bench.settings import BenchSettings
from loraplex.bench.workload import parse_arrivals, parse_lengths, parse_popularity
from loraplex.cli import bench
from loraplex.cli.bench import RunBar, _plan
from loraplex.testing.fake_clock import FakeClock


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_the_plan_and_the_time_left(capsys):
    clock = FakeClock()
    bar = RunBar("measures x", clock)
    assert capsys.readouterr().err == "measures x\n"
    clock.advance_seconds(20)
    assert bar.line() == "starting, 20 s so far"
    bar.begin_runs(4)
    assert "4 runs; the time left is known after the first one" in capsys.readouterr().err
    clock.advance_seconds(5)
    assert bar.line() == "measuring: 0 of 4 runs in 25 s"
    bar.end_run("closed:1, base")
    assert bar.line() == "measuring: 1 of 4 runs in 25 s, about 15 s left"


def test_lines_come_by_themselves(capsys, monkeypatch):
    said = threading.Event()
    monkeypatch.setattr(bench, "_LINE_SECONDS", 0.01)
    monkeypatch.setattr(RunBar, "say", lambda bar, line: "so far" in line and said.set())
    with RunBar("measures x"):
        assert said.wait(60)


def test_a_bar_moves_on_a_terminal(monkeypatch):
    moved = threading.Event()
    monkeypatch.setattr(bench, "_BAR_SECONDS", 0.01)
    monkeypatch.setattr(sys, "stderr", Terminal())
    bar = RunBar("measures x")
    monkeypatch.setattr(bar._bar, "refresh", lambda: moved.set())
    with bar:
        assert moved.wait(60)


@pytest.mark.parametrize(("num_adapters", "popularities"), [(4, "base, distinct"), (0, "base")])
def test_the_plan_names_loads_popularities_and_requests(num_adapters, popularities):
    settings = BenchSettings(
        loads=(parse_arrivals("closed:1"), parse_arrivals("closed:8")),
        popularities=(parse_popularity("distinct"),),
        num_adapters=num_adapters,
        num_requests=None,
        prompt_tokens=parse_lengths("32"),
        output_tokens=parse_lengths("32"),
        repeats=3,
        seed=0,
    )
    num_requests = 24 * len(popularities.split(", "))
    assert _plan("http://x", settings) == (
        f"measures http://x: closed:1, closed:8, each with {popularities}; {num_requests} requests "
        "in a pass, 1 pass to warm up and 3 that count"
    )
