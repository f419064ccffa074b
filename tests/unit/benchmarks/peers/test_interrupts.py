"""A signal ends the comparison and every process that it started; the journal goes on."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from comparison.fixture_tokenizer import FIRST_WORD_ID
from comparison.journal import Measured, read_journal
from comparison.processes import process_tree

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")

COMPARE = """
import sys, typer, compare
from comparison.shapes import SHAPES, ModelShape
SHAPES["tiny"] = ModelShape(
    name="tiny", hidden_size=32, num_layers=1, num_heads=4, num_kv_heads=2, ffn_size=48,
    vocab_size=2000,
)
typer.run(compare.compare)
"""
# Has a child in a session of its own, and writes down both ids.
STUBBORN = """
import os, signal, subprocess, sys
from pathlib import Path
if "--version" in sys.argv:
    sys.exit("version: 1")
sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
child = subprocess.Popen(sleep, start_new_session=True)
def write_pids(name):
    draft = Path({folder!r}, f"draft-{{os.getpid()}}")
    draft.write_text(f"{{os.getpid()}} {{child.pid}}")
    draft.rename(Path({folder!r}, f"{{name}}-{{os.getpid()}}.pids"))
"""
HANGS = """
import time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
write_pids({name!r})
time.sleep(600)
"""
CONVERTS = """
import pathlib, sys
pathlib.Path(sys.argv[sys.argv.index("--outfile") + 1]).touch()
"""
SERVES = """
import json, sys, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        count = body["n_predict"]
        if count == 64 and {waits}:  # a measured run of W2: the warm-up's outputs have one token
            write_pids("running")
            time.sleep(600)
        self.send_response(200)
        self.end_headers()
        adapter = sum(10 * (1 + one["id"]) for one in body.get("lora", []) if one["scale"])
        first = {first_word} + adapter + sum(body["prompt"]) % 100
        for number in range(count):
            chunk = {{"tokens": [first + number % 7], "stop": number + 1 == count,
                     "tokens_evaluated": len(body["prompt"]), "tokens_predicted": count}}
            self.wfile.write(b"data: " + json.dumps(chunk).encode() + b"\\n\\n")
    def log_message(self, *args):
        pass
port = int(sys.argv[sys.argv.index("--port") + 1])
ThreadingHTTPServer.request_queue_size = 64
ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


@pytest.fixture
def llama_cpp(executable, tmp_path):
    """A function (hangs_in) -> a folder like llama.cpp's.

    What hangs in its start or conversion ignores SIGTERM.

    hangs_in: "converting", "starting", "running", or "" for none of them.
    """

    def make(hangs_in: str) -> Path:
        folder = tmp_path / "llama.cpp"
        stubborn = STUBBORN.format(folder=str(tmp_path))
        serves = SERVES.format(waits=hangs_in == "running", first_word=FIRST_WORD_ID)
        hangs = HANGS.format(name=hangs_in)
        server = hangs if hangs_in == "starting" else serves
        server = stubborn + server if hangs_in else server
        executable(folder / "build" / "bin" / "llama-server", server)
        converts = stubborn + hangs if hangs_in == "converting" else CONVERTS
        for script in ("convert_hf_to_gguf.py", "convert_lora_to_gguf.py"):
            executable(folder / script, converts)
        return folder

    return make


@pytest.fixture
def compare(tmp_path):
    """A function (folder of llama.cpp) -> the running comparison."""
    started = []

    def start(folder: Path) -> subprocess.Popen:
        arguments = [str(tmp_path / "out"), "--peer", f"llama.cpp={folder}", "--weights", "16"]
        arguments += ["--only", "F16"]
        arguments += ["--workloads", "W1,W2", "--rounds", "1", "--fixtures", str(tmp_path / "made")]
        started.append(
            subprocess.Popen(
                [sys.executable, "-c", COMPARE, *arguments],
                env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        )
        return started[-1]

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


def wait_for_pids(tmp_path: Path, name: str, process: subprocess.Popen) -> list[int]:
    end = time.monotonic() + 120
    while time.monotonic() < end:
        if files := [*tmp_path.glob(f"{name}-*.pids")]:
            return [int(pid) for file in files for pid in file.read_text().split()]
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.02)
    raise AssertionError(f"{name}: no process wrote its ids")


def assert_gone(pids: list[int]) -> None:
    end = time.monotonic() + 60
    while process_tree(pids) and time.monotonic() < end:
        time.sleep(0.01)
    assert process_tree(pids) == []


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.some(2)
@pytest.mark.covering(1)
@pytest.mark.parametrize("hangs_in", ["converting", "starting", "running"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_all_and_a_second_start_goes_on(
    llama_cpp, compare, tmp_path, hangs_in, number
):
    process = compare(llama_cpp(hangs_in))
    pids = wait_for_pids(tmp_path, hangs_in, process)
    process.send_signal(number)
    # What ignores SIGTERM is killed after half a minute, or by a second signal.
    while "a second one kills" not in (line := process.stdout.readline()):
        assert line
    process.send_signal(number)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 128 + number, output
    assert f"ended by {number.name}" in output
    assert_gone(pids)

    measured = [*read_journal(tmp_path / "out.jsonl").of(Measured)]
    assert [run.case for run in measured] == (["W1"] if hangs_in == "running" else [])
    again = compare(llama_cpp(""))
    output, _ = again.communicate(timeout=120)
    assert again.returncode == 0, output
    runs = [*read_journal(tmp_path / "out.jsonl").of(Measured)]
    assert [run.case for run in runs] == ["W1", "W2-8", "W2-32"]
    assert [run.error for run in runs if not run.is_good] == []
    assert runs[: len(measured)] == measured
