r"""Requests a second and processor time of a server with one front-end process and with two.

    PYTHONPATH=tests python benchmarks/frontend_processes.py [--rounds 5] [--seconds 3] \
        [--output benchmarks/results/frontend-processes]

Both servers run all the time and are used in turns. Their engine is a process without a model, so
that the front ends have the work. The clients run on this machine, too: with two cores, two
processes can hardly finish more requests than one. The owner takes its share of the connections,
too; its processor time for each request limits what a server can handle.
"""

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from loraplex.app.server import Server
from loraplex.app.serving_process import run_on_event_loop
from loraplex.bench.machine import Code, Machine, machine_lines, this_code, this_machine
from loraplex.bench.report import markdown_table, write_pair
from loraplex.core.config import Config, ModelConfig
from loraplex.core.server_config import ServerConfig
from loraplex.demo import BASE_PATH
from support.fake_engine_process import FakeEngineSettings, fake_engine_process
from support.server_in_loop import CAPACITY

HERE = Path(__file__).parent
NUM_PROCESSES = (1, 2)
CONNECTIONS = 32
KINDS = {"one token": 1, "stream of 64": 64}
"""Tokens of each request."""
_PROMPT = "The capital of France is Paris. " * 8
_TICKS = os.sysconf("SC_CLK_TCK")
_READY = "Started HTTPService at "


class Cell(msgspec.Struct, frozen=True):
    """What one server did in one round."""

    kind: str
    processes: int
    requests_per_second: float
    owner_ms: float
    """Processor time of the owner for each request."""
    others_ms: float
    """The same of the other front-end processes."""


class FrontendReport(msgspec.Struct, frozen=True):
    created: str
    code: Code
    machine: Machine
    loads: tuple[float, ...]
    """The load average before each round."""
    cells: tuple[Cell, ...]


async def serve(number: int) -> None:
    """Serve until standard input ends."""
    engine = FakeEngineSettings(step_seconds=0.001, capacity=CAPACITY)
    with tempfile.TemporaryDirectory() as folder:
        settings = ServerConfig(
            http_port=0,
            grpc=False,
            metrics=False,
            state_dir=folder,
            frontend_processes=number,
            stop_with_stdin=True,
            log_level="warning",
        )
        config = Config(server=settings, models={"m": ModelConfig(path=str(BASE_PATH))})
        server = Server(config, lambda _: fake_engine_process(engine), _print_line)
        await server.run()


def _print_line(line: str) -> None:
    print(line, flush=True)


@contextlib.contextmanager
def server(number: int) -> Iterator[tuple[int, int]]:
    """Run a server; yield its process id and port."""
    command = [sys.executable, str(HERE / "frontend_processes.py"), "--serve", str(number)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **pipes) as process:  # type: ignore[call-overload]
        line = ""
        while not line.startswith(_READY):
            line = process.stdout.readline()
            assert line, "the server ended as it started"
        try:
            yield process.pid, int(line.rpartition(":")[2])
        finally:
            process.stdin.close()
            process.wait(60)


def processor_seconds(pid: int) -> tuple[float, float]:
    """Return the processor time of an owner, and that of the other front-end processes."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    others = [
        int(child)
        for child in children
        if b"loraplex.app.frontend_process" in Path(f"/proc/{child}/cmdline").read_bytes()
    ]
    return _seconds(pid), sum(map(_seconds, others))


def _seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


async def load(port: int, tokens: int, seconds: float) -> tuple[int, float]:
    """Send requests over all connections, and return how many in which time."""
    body = {"model": "m", "prompt": _PROMPT, "max_tokens": tokens, "ignore_eos": True}
    data = json.dumps(body | {"stream": tokens > 1}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    request = f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data
    begin = time.monotonic()
    counts = await asyncio.gather(
        *(_connection(port, request, begin + seconds) for _ in range(CONNECTIONS))
    )
    return sum(counts), time.monotonic() - begin


async def _connection(port: int, request: bytes, end: float) -> int:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    count = 0
    while time.monotonic() < end:
        writer.write(request)
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        assert b" 200 " in head, head
        if b"content-length: " in head:
            length = head.partition(b"content-length: ")[2].partition(b"\r")[0]
            await reader.readexactly(int(length))
        else:
            await reader.readuntil(b"\r\n0\r\n\r\n")
        count += 1
    writer.close()
    return count


def measure(servers: dict[int, tuple[int, int]], kind: str, seconds: float) -> Iterator[Cell]:
    """Yield one cell for each server."""
    for number, (pid, port) in servers.items():
        before = processor_seconds(pid)
        count, taken = asyncio.run(load(port, KINDS[kind], seconds))
        owner, others = (
            now - then for now, then in zip(processor_seconds(pid), before, strict=True)
        )
        yield Cell(kind, number, count / taken, 1000 * owner / count, 1000 * others / count)


def markdown(report: FrontendReport) -> str:
    lines = ["# Front-end processes", "", (__doc__ or "").rpartition("\n\n")[2].strip(), ""]
    lines += machine_lines(report.created, report.code, report.machine)
    low, high = min(report.loads), max(report.loads)
    lines += [f"load average before the rounds: {low:.1f} to {high:.1f}; medians of the rounds", ""]
    rows = []
    for kind in KINDS:
        for number in NUM_PROCESSES:
            cells = [cell for cell in report.cells if (cell.kind, cell.processes) == (kind, number)]
            rate = statistics.median(cell.requests_per_second for cell in cells)
            owner = statistics.median(cell.owner_ms for cell in cells)
            others = statistics.median(cell.others_ms for cell in cells)
            rows.append([kind, str(number), f"{rate:.0f}", f"{owner:.2f}", f"{others:.2f}"])
    columns = ["", "processes", "requests/s", "owner's CPU ms/request", "others' CPU ms/request"]
    return "\n".join([*lines, markdown_table(columns, rows), ""])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--output", type=Path, default=HERE / "results" / "frontend-processes")
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.serve:
        run_on_event_loop(serve(options.serve))
        return
    cells: list[Cell] = []
    loads: list[float] = []
    with contextlib.ExitStack() as stack:
        servers = {number: stack.enter_context(server(number)) for number in NUM_PROCESSES}
        for _ in range(options.rounds):
            loads.append(os.getloadavg()[0])
            for kind in KINDS:
                cells += measure(servers, kind, options.seconds)
    report = FrontendReport(
        created=time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime()),
        code=this_code(),
        machine=this_machine(),
        loads=tuple(loads),
        cells=tuple(cells),
    )
    write_pair(report, markdown(report), options.output.with_suffix(".json"))
    print(markdown(report))


if __name__ == "__main__":
    main()
