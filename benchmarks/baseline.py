"""Figures with which a change of the architecture is compared: one report, from parts of others.

    OMP_WAIT_POLICY=PASSIVE PYTHONPATH=tests:docs python benchmarks/baseline.py

writes results/baseline.json and .md. Steps are those of step.py with the fixture `tiny`, the
transport is that of transport.py (our Triton front ends with an echo model), and starts are those
of startup.py. The server with the shipped model is measured idle, and while it serves the requests
of tools.request_paths one after the other. The machine may have other work: where nothing else is
stated, a figure is the least of the repeats.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import step
import transport
from comparison.fixtures import Fixture
from comparison.processes import cpu_seconds, process_tree, resident_bytes
from comparison.shapes import TINY
from results_file import write_report
from startup import measure as measure_starts

from loraplex.bench.report import markdown_table
from loraplex.core.environment import cache_directory
from loraplex.core.plan import StepPlan
from loraplex.demo import BASE_PATH
from loraplex.engine.engine import EngineTurn
from loraplex.parallel.messages import Plan, encode, for_other_ranks
from loraplex.testing.running_server import serving
from tools.request_paths import PATHS, connection, new_adapter

BATCHES = (1, 8, 32)
NUM_STEPS = 12
NUM_TOKENS = NUM_STEPS + 40
"""Tokens of each row: enough for the steps in which others still compute their prompts, too."""
NUM_REQUESTS = 40
"""Requests of a repeat: their processor time is many of the system's ticks of 10 ms."""
IDLE_SECONDS = 10.0
TRANSPORTS = ("http unary", "grpc unary", "http stream", "grpc stream", "http ensemble")

Row = dict[str, Any]


def of_steps(repeats: int) -> list[Row]:
    """Milliseconds of a decoding step, and the bytes of its plan as other ranks receive it."""
    fixture = Fixture(TINY, cache_directory() / "bench")
    fixture.ensure_model()
    arguments = argparse.Namespace(
        dtype="bfloat16",
        quantization="none",
        context=256,
        steps=NUM_TOKENS,  # the longest sequence has twice this number more than the context
        batches=BATCHES,
    )
    subject = step.make_subject(fixture.model, arguments)
    sizes = _sizes_of_plans(subject)
    rows = []
    for batch in BATCHES:
        for has_adapters in (False, True):
            sizes.clear()
            steps = [
                one
                for _ in range(repeats)
                for one in _measured_steps(subject, batch, has_adapters, sizes)
            ]
            seconds, processor_seconds, plan_bytes = zip(*steps, strict=True)
            rows.append(
                {
                    "batch": batch,
                    "adapters": batch if has_adapters else 0,
                    "step_ms": 1e3 * min(seconds),
                    "processor_ms": 1e3 * min(processor_seconds),
                    "plan_bytes": statistics.median(plan_bytes),
                    "largest_plan_bytes": max(sizes),
                }
            )
    return rows


def _measured_steps(
    subject: step.Subject, batch: int, has_adapters: bool, sizes: list[int]
) -> list[tuple[float, float, int]]:
    """Return seconds, processor seconds and bytes of the plan of decoding steps."""
    engine = subject.engine
    num_prompt_tokens = subject.context - NUM_STEPS
    step.add_requests(subject, batch, num_prompt_tokens, NUM_TOKENS, has_adapters=has_adapters)

    def is_decoding(turn: EngineTurn) -> bool:
        record = turn.record
        return record is not None and record.num_rows == batch and not record.num_prefill_rows

    while not is_decoding(engine.step()):
        pass
    engine.step()  # such a step is recorded the first time, and repeated the next
    measured = []
    for _ in range(NUM_STEPS):
        start, used = time.perf_counter(), time.process_time()
        turn = engine.step()
        times = time.perf_counter() - start, time.process_time() - used
        assert is_decoding(turn), "a row had ended"
        measured.append((*times, sizes[-1]))
    while not engine.is_idle:
        engine.step()
    return measured


def _sizes_of_plans(subject: step.Subject) -> list[int]:
    """Return the list to which each plan's size is added from now on."""
    runner, sizes = subject.engine._runner, list[int]()
    launch = runner.launch

    def launched(plan: StepPlan) -> Any:
        sizes.append(len(encode(Plan(for_other_ranks(plan)))))
        return launch(plan)

    runner.launch = launched  # type: ignore[method-assign]
    return sizes


def of_transport(repeats: int) -> list[Row]:
    rows = []
    with transport.our_server(()) as ours:
        for kind in TRANSPORTS:
            for concurrency in transport.CONCURRENCIES:
                samples = [transport.sample(ours, kind, concurrency, 1.0) for _ in range(repeats)]
                rows.append(
                    {
                        "requests": kind,
                        "at_once": concurrency,
                        "processor_ms": min(sample.processor_ms for sample in samples),
                        "per_second": max(s.measured.responses_per_second for s in samples),
                    }
                )
    return rows


def of_server(repeats: int) -> tuple[list[Row], list[Row]]:
    """Processor time of requests, and memory and processor time of the idle server."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        adapter = new_adapter(folder / "adapter")
        flags = ("--allowed-adapter-roots", name, "--log-level", "warning")
        with serving(folder / "state", *flags) as server, connection(server.http_port) as send:
            pid = server.process.pid
            time.sleep(IDLE_SECONDS)
            memory = resident_bytes([pid])
            used = _processor_seconds(pid, lambda: time.sleep(IDLE_SECONDS))
            idle = {
                "processes": len(process_tree([pid])),
                "memory_mib": memory / 2**20,
                "processor_ms_per_second": 1e3 * used / IDLE_SECONDS,
            }
            requests = []
            for kind, path in PATHS.items():

                def exchange(path: Any = path) -> None:
                    for _ in range(NUM_REQUESTS):
                        path.send(send, adapter)
                        path.undo(send)

                exchange()
                used = min(_processor_seconds(pid, exchange) for _ in range(repeats))
                requests.append({"requests": kind, "processor_ms": 1e3 * used / NUM_REQUESTS})
    return [idle], requests


def _processor_seconds(pid: int, action: Callable[[], None]) -> float:
    before = cpu_seconds([pid])
    action()
    return cpu_seconds([pid]) - before


def of_starts(repeats: int) -> list[Row]:
    laps = measure_starts(BASE_PATH, repeats, ())
    return [{"start": name, **lap._asdict()} for name, lap in laps.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--note", default="", help="what else the machine did")
    arguments = parser.parse_args()
    repeats = arguments.repeats
    idle, requests = of_server(repeats)
    parts = {
        "Decoding steps (tiny, bfloat16, 256 tokens of context)": of_steps(repeats),
        "Our Triton front ends with an echo model": of_transport(repeats),
        "Processor time of a request (shipped model, 2 tokens; a load with its unload)": requests,
        "Idle server (shipped model, two adapters)": idle,
        "Starts (shipped model)": of_starts(repeats),
    }
    blocks = [arguments.note] if arguments.note else []
    for title, rows in parts.items():
        columns = [name.replace("_", " ") for name in rows[0]]
        blocks += [f"## {title}", markdown_table(columns, [_cells(row) for row in rows])]
    text = "\n\n".join(blocks)
    print(text)
    rows = [{"part": title, **row} for title, found in parts.items() for row in found]
    write_report("baseline", "Baseline of a change of the architecture", rows, text)


def _cells(row: Row) -> list[str]:
    return [f"{value:.4g}" if isinstance(value, float) else f"{value}" for value in row.values()]


if __name__ == "__main__":
    main()
