"""The marker of steps in flight, also of a process that is killed."""

import subprocess
import sys

from loraplex.engine.step_marker import MAX_ROWS, Progress, StepMarker, create_marker_file

WRITER = """
import os, signal, sys
from pathlib import Path
from loraplex.engine.step_marker import open_marker_file

marker = open_marker_file(Path(sys.argv[1]))
marker.begin(6, (1, 2, 2**64 - 1))
marker.beat()
marker.begin(7, (2, 9))
marker.end(6)
marker.begin(8, (4,), 5)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_steps_in_flight():
    marker = StepMarker()
    assert marker.request_ids() == frozenset()
    marker.begin(1, (5, 6, 5))
    marker.begin(2, (6, 7))
    assert marker.request_ids() == {5, 6, 7}
    marker.end(1)
    assert marker.request_ids() == {6, 7}
    marker.begin(3, ())
    marker.end(2)
    assert marker.request_ids() == frozenset()


def test_a_step_without_end():
    marker = StepMarker()
    marker.begin(2, tuple(range(MAX_ROWS + 1)))
    marker.begin(3, tuple(range(MAX_ROWS, 2 * MAX_ROWS)))
    assert marker.request_ids() == set(range(2 * MAX_ROWS))


def test_what_a_killed_process_had_noted_is_there(tmp_path):
    marker = create_marker_file(tmp_path / "steps")
    subprocess.run([sys.executable, "-c", WRITER, tmp_path / "steps"], check=False)
    assert marker.request_ids() == {2, 9, 4}
    assert marker.progress() == Progress(5, 5)


def test_progress():
    marker = StepMarker()
    assert marker.progress() == Progress(0)
    marker.beat()
    assert marker.progress() == Progress(1)
    marker.begin(1, (5, 6), 20)
    marker.begin(2, (6,), 1)
    assert marker.progress() == Progress(3, 21)
    marker.end(1)
    marker.end(2)
    assert marker.progress() == Progress(5)
