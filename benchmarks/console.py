r"""Step time of an engine with three open consoles against none.

    PYTHONPATH=tests python benchmarks/console.py [--rounds 10] [--consoles 3]

One server with the demo's model computes the same requests again and again, in pairs of runs: one
run without viewers, one with them, in turns of order. A viewer is what the live screen is to a
server: two requests twice a second, in a process of its own, since browsers run on other machines.
A run's times are the median duration of its full decoding steps and the processor time of the
engine's process for each step, which other work on the machine changes little. The engine has one
thread, so that a core of two is left for the viewers. Writes results/console.json and .md.
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from results_file import write_report

from loraplex.testing.running_server import RunningServer, serving
from support.engine_kills import engine_pid

MODELS = ("capitals", "chinese", "japanese")
ROWS = 8
TOKENS = 400
POLL_SECONDS = 0.5
NUM_POLLS = 200
REQUEST = {"max_tokens": TOKENS, "ignore_eos": True, "temperature": 0}


def view(url: str) -> None:
    """Poll as the console's screens/live/engine.js does."""
    with httpx.Client(base_url=url, timeout=60) as client:
        last = client.get("/v1/iterations?limit=1").json()[0]["start_ns"]
        while True:
            steps = client.get(f"/v1/iterations?after_ns={last}&limit=1000").json()["data"]
            last = steps[-1]["start_ns"] if steps else last
            client.get("/v1/internal/stats?model=capitals").raise_for_status()
            time.sleep(POLL_SECONDS)


@contextmanager
def viewers(url: str, number: int) -> Iterator[None]:
    if not number:
        yield
        return
    flags = ("--view", url, "--consoles", str(number))
    process = subprocess.Popen([sys.executable, __file__, *flags])
    try:
        time.sleep(2)  # until it polls
        yield
        assert process.poll() is None, "the viewers ended"
    finally:
        process.kill()
        process.wait()


def processor_ns(pid: int) -> int:
    """Return the time that the threads of a process have computed."""
    tasks = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(task.read_text().split()[0]) for task in tasks)


def run(server: RunningServer, prompts: Iterator[int], num_viewers: int) -> dict[str, Any]:
    """Return the times of one run's full decoding steps."""
    with viewers(server.url, num_viewers):
        pid = engine_pid(server)
        assert pid is not None
        begin_ns = processor_ns(pid)
        since = json.loads(server.get("/v1/iterations?limit=1")[1])[-1]["start_ns"]
        bodies = [
            {"model": model, "prompt": f"{next(prompts)}: x", **REQUEST}
            for model in itertools.islice(itertools.cycle(MODELS), ROWS)
        ]
        with ThreadPoolExecutor(ROWS) as pool:
            for status, _ in pool.map(lambda body: server.post("/v1/completions", body), bodies):
                assert status == 200
        computed_ns = processor_ns(pid) - begin_ns
        path = f"/v1/iterations?after_ns={since}&limit=10000"
        steps = json.loads(server.get(path)[1])["data"]
    full = [
        step["duration_ns"] / 1e6
        for step in steps
        if step["num_rows"] == ROWS and not step["num_prefill_rows"]
    ]
    lora = [step["timing"]["lora_ns"] / 1e6 for step in steps if step["num_rows"] == ROWS]
    return {
        "viewers": num_viewers,
        "load": os.getloadavg()[0],
        "steps": len(full),
        "median_ms": statistics.median(full),
        "processor_ms": computed_ns / 1e6 / len(steps),
        "lora_ms": statistics.median(lora),
    }


def poll_cost(server: RunningServer) -> tuple[float, float]:
    """Return the server's and the engine's processor time for a poll of 200 steps, in ms."""
    engine = engine_pid(server)
    assert engine is not None
    since = json.loads(server.get("/v1/iterations?limit=201")[1])[0]["start_ns"]
    paths = (
        f"/v1/iterations?after_ns={since}&limit=1000",
        "/v1/internal/stats?model=capitals",
    )
    pids = (server.process.pid, engine)
    with httpx.Client(base_url=server.url, timeout=60) as client:
        before = [processor_ns(pid) for pid in pids]
        for _ in range(NUM_POLLS):
            for path in paths:
                client.get(path).raise_for_status()
    own, of_engine = (
        (processor_ns(pid) - start) / NUM_POLLS / 1e6
        for pid, start in zip(pids, before, strict=True)
    )
    return own, of_engine


def measure(rounds: int, consoles: int) -> tuple[list[dict[str, Any]], str]:
    """Return the runs, and what a poll costs, as a sentence."""
    prompts = itertools.count()
    rows = []
    with (
        tempfile.TemporaryDirectory() as state,
        serving(Path(state), "--num-threads", "1") as server,
    ):
        server.post("/v1/completions", {"model": "capitals", "prompt": "x", **REQUEST})
        run(server, prompts, 0)
        for number in range(rounds):
            for num_viewers in (0, consoles) if number % 2 else (consoles, 0):
                rows.append({"round": number, **run(server, prompts, num_viewers)})
                print(rows[-1], flush=True)
        own, of_engine = poll_cost(server)
    share = own * consoles / POLL_SECONDS / 10
    return rows, (
        f"A poll of 200 steps costs the server {own:.2f} ms of a core and the engine "
        f"{of_engine:.3f} ms: {consoles} consoles take {share:.1f} % of a core from the server."
    )


def report(rows: list[dict[str, Any]], consoles: int) -> str:
    lines = [
        f"{len(rows) // 2} pairs of runs of {rows[0]['steps']} steps with {ROWS} rows; medians.",
        "",
        f"| | no viewers | {consoles} | ratio of pairs | least | most |",
        "|---|---|---|---|---|---|",
    ]
    for name, key in (("step, ms", "median_ms"), ("processor time, ms", "processor_ms")):
        without = [row[key] for row in rows if not row["viewers"]]
        viewed = [row[key] for row in rows if row["viewers"]]
        ratios = [after / before for after, before in zip(viewed, without, strict=True)]
        middle = [statistics.median(values) for values in (without, viewed, ratios)]
        values = [f"{value:.3f}" for value in (*middle, min(ratios), max(ratios))]
        lines.append(f"| {name} | {' | '.join(values)} |")
    load = statistics.median(row["load"] for row in rows)
    lines += ["", f"Processes that wanted a core meanwhile: {load:.1f} of {os.cpu_count()} cores."]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--consoles", type=int, default=3)
    parser.add_argument("--view", metavar="URL", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.view:
        for _ in range(arguments.consoles):
            threading.Thread(target=view, args=(arguments.view,)).start()
        return
    rows, cost = measure(arguments.rounds, arguments.consoles)
    text = f"{report(rows, arguments.consoles)}\n\n{cost}"
    write_report("console", "Step time with open consoles", rows, text)
    print(text)


if __name__ == "__main__":
    main()
