"""Storing weights steps aside while requests are served."""

import contextlib
import threading
from collections.abc import Callable

import pytest

from loraplex.execution.weights import background_store
from loraplex.execution.weights.background_store import BackgroundStore, rest_after


@pytest.mark.parametrize(
    ("piece_seconds", "idle_seconds", "rest"),
    [(0.01, 0.1, 0.08), (0.01, 4.9, 0.08), (0.01, 5.0, 0.0), (60.0, 0.1, 5.0)],
)
def test_it_rests_eight_times_as_long_as_it_works_while_steps_run(
    piece_seconds: float, idle_seconds: float, rest: float
) -> None:
    assert rest_after(piece_seconds, idle_seconds) == rest


def test_a_step_is_noted_and_a_stop_ends_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    noted: list[float] = []
    resting, may_work = threading.Event(), threading.Event()

    def rest(piece_seconds: float, idle_seconds: float) -> float:
        noted.append(idle_seconds)
        resting.set()
        return 3600

    def store(pause: Callable[[], None]) -> None:
        assert may_work.wait(60)
        pause()
        raise AssertionError("the stop ends the work")

    monkeypatch.setattr(background_store, "rest_after", rest)
    storing = BackgroundStore(store, contextlib.ExitStack())
    storing.note_step()
    may_work.set()
    assert resting.wait(60)
    storing.close()
    assert noted[0] < 60


def test_it_rests_for_what_it_computes_and_not_for_what_it_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A piece of a busy server waits for a core, most of its time."""
    pieces: list[float] = []
    of_core = iter((0.25, 0.75, 0.875))

    def rest(piece_seconds: float, idle_seconds: float) -> float:
        pieces.append(piece_seconds)
        return 0

    def store(pause: Callable[[], None]) -> None:
        for _ in range(3):
            pause()

    monkeypatch.setattr(background_store, "rest_after", rest)
    monkeypatch.setattr("time.thread_time", lambda: next(of_core))
    BackgroundStore(store, contextlib.ExitStack()).wait()
    assert pieces == [0.25, 0.5, 0.125]
