"""The interpreter exits with LLM objects that nothing has closed."""

import subprocess
import sys

import pytest

PROGRAM = """
import os, sys
from loraplex import LLM, SamplingParams
from loraplex.demo import BASE_PATH

small = {"kv_cache_bytes": "8MiB", "num_threads": 1}
first, second = (LLM(BASE_PATH, state_dir=f"{sys.argv[1]}/{n}", **small) for n in "ab")
endless = SamplingParams(max_tokens=2000, ignore_eos=True)
running = first.stream("What is the capital of France?", endless)
next(running)
child = os.fork()
if child == 0:
    sys.exit(0)
os.waitpid(child, 0)
print("done")
if sys.argv[2] == "raise":
    raise ValueError("the program's own")
"""


@pytest.mark.slow
@pytest.mark.parametrize("end", ["return", "raise"])
def test_open_llms_end_quietly(end, tmp_path, monkeypatch):
    """The second is still at its upkeep, and a request of the first is running."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path), end],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.stdout == "done\n"
    lines = done.stderr.splitlines()
    assert lines[-1:] == ([] if end == "return" else ["ValueError: the program's own"])
    assert [
        line for line in lines[1:-1] if line.startswith("Traceback") or "shutdown" in line
    ] == []
    assert done.returncode == (end == "raise")
    assert list(tmp_path.glob("loraplex-*")) == []  # folders of engines
