r"""Costs of our Triton front ends and of the real Triton's: the same clients, echo models.

    make .triton
    PYTHONPATH=tests python benchmarks/transport.py [--pairs 5] [--seconds 2] \
        [--output benchmarks/results/transport]

Ours is transport_server.py; the real one is tritonserver 2.51 with the models of
transport_models.py. Both are up all the time, and are used in turns: ours, real, ours, real. The
clients run on this machine, too. Processor time is that of the server's processes, and hardly
depends on what else the machine does.
"""

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
from transport_client import STREAM_LENGTH, Measured
from transport_models import write_repository

from loraplex.bench.machine import Code, Machine, machine_lines, this_code, this_machine
from loraplex.bench.report import markdown_table, write_pair
from support.real_triton import MISSING, running_triton, tritonserver

HERE = Path(__file__).parent
CELLS = (
    *("http unary", "grpc unary", "http tritonclient", "grpc tritonclient"),
    *("http stream", "grpc stream", "http ensemble", "grpc ensemble"),
)
CONCURRENCIES = (1, 16)
_TICKS = os.sysconf("SC_CLK_TCK")


class Address(msgspec.Struct, frozen=True):
    http: str
    grpc: str
    pid: int

    def of(self, cell: str) -> str:
        return self.http if cell.startswith("http") else self.grpc


class Sample(msgspec.Struct, frozen=True):
    """What one server did in one cell, once."""

    measured: Measured
    processor_ms: float
    """Time of the server's processes for each response."""


class Cell(msgspec.Struct, frozen=True):
    kind: str
    concurrency: int
    ours: tuple[Sample, ...]
    real: tuple[Sample, ...]

    @property
    def ratios(self) -> list[float]:
        """Ours over the real one's in responses a second, pair by pair."""
        pairs = zip(self.ours, self.real, strict=True)
        return [
            ours.measured.responses_per_second / real.measured.responses_per_second
            for ours, real in pairs
        ]


class TransportReport(msgspec.Struct, frozen=True):
    created: str
    code: Code
    machine: Machine
    settings: tuple[str, ...]
    """Settings of our server that differ from the defaults."""
    loads: tuple[float, ...]
    """The load average before each pair."""
    cells: tuple[Cell, ...]


# ---------------------------------------------------------------- servers


@contextlib.contextmanager
def our_server(settings: Sequence[str]) -> Iterator[Address]:
    command = [sys.executable, str(HERE / "transport_server.py"), *settings]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **pipes) as process:  # type: ignore[call-overload]
        try:
            http, grpc = process.stdout.readline().split()
            yield Address(http, grpc, process.pid)
        finally:
            process.stdin.close()
            process.wait(30)


@contextlib.contextmanager
def real_server(program: Path) -> Iterator[Address]:
    with tempfile.TemporaryDirectory() as folder:
        repository = Path(folder) / "repository"
        write_repository(repository)
        with running_triton(program, repository, Path(folder) / "triton.log") as triton:
            yield Address(triton.http, triton.grpc, triton.process.pid)


def processor_seconds(pid: int) -> float:
    """Processor time of a process and those that it has started."""
    return sum(_own_seconds(each) for each in (pid, *_children(pid)))


def _own_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def _children(pid: int) -> Iterator[int]:
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            yield int(child)
            yield from _children(int(child))


# ---------------------------------------------------------------- measuring


def sample(server: Address, kind: str, concurrency: int, seconds: float) -> Sample:
    before = processor_seconds(server.pid)
    arguments = [kind, server.of(kind), str(concurrency), str(seconds)]
    command = [sys.executable, str(HERE / "transport_client.py"), *arguments]
    output = subprocess.run(command, check=True, capture_output=True).stdout
    measured = msgspec.json.decode(output, type=Measured)
    used = processor_seconds(server.pid) - before
    return Sample(measured, 1000 * used / measured.num_responses)


def measure(
    ours: Address, real: Address, pairs: int, seconds: float
) -> tuple[tuple[Cell, ...], tuple[float, ...]]:
    """The cells, and the load before each pair."""
    cells, loads = [], []
    for kind in CELLS:
        for concurrency in CONCURRENCIES:
            samples: dict[Address, list[Sample]] = {ours: [], real: []}
            for _ in range(pairs):
                loads.append(os.getloadavg()[0])
                for server, taken in samples.items():
                    taken.append(sample(server, kind, concurrency, seconds))
            cells.append(Cell(kind, concurrency, tuple(samples[ours]), tuple(samples[real])))
            print(_row(cells[-1]), file=sys.stderr, flush=True)
    return tuple(cells), tuple(loads)


# ---------------------------------------------------------------- telling


def markdown(report: TransportReport) -> str:
    lines = ["# Costs of the transport, compared with the real Triton", ""]
    lines.append(
        f"Medians of {len(report.cells[0].ours)} runs each, in turns; both serve an echo model. A "
        f"streamed request brings {STREAM_LENGTH} responses. The ratio is of responses a second, "
        "ours over the real one's: the median of the pairs, and their range. CPU is the servers' "
        "processor time for a response. Unary over HTTP goes through bare sockets, over gRPC "
        "through bare stubs; tritonclient's rows are the same requests through its own clients. "
        "The real one's ensemble has three models that echo, called and wired as the "
        "TensorRT-LLM backend's; in all other rows it is one. Ours does the same in all rows: "
        "what it does for a model of texts."
    )
    lines += ["", *machine_lines(report.created, report.code, report.machine)]
    low, high = min(report.loads), max(report.loads)
    lines.append(f"load average before the pairs: {low:.1f} to {high:.1f}")
    if report.settings:
        lines.append(f"our settings: {', '.join(report.settings)}")
    columns = ["", "at once", "ours/s", "real/s", "ratio", "range"]
    columns += ["ours p50 ms", "real p50 ms", "ours CPU ms", "real CPU ms"]
    rows = [_row(cell) for cell in report.cells]
    return "\n".join([*lines, "", markdown_table(columns, rows), ""])


def _row(cell: Cell) -> list[str]:
    rates = [
        _median([s.measured.responses_per_second for s in of]) for of in (cell.ours, cell.real)
    ]
    p50s = [_median([s.measured.p50_ms for s in of]) for of in (cell.ours, cell.real)]
    used = [_median([s.processor_ms for s in of]) for of in (cell.ours, cell.real)]
    ratios = sorted(cell.ratios)
    return [
        *(cell.kind, str(cell.concurrency), *(f"{rate:.0f}" for rate in rates)),
        *(f"{_median(ratios):.2f}", f"{ratios[0]:.2f} to {ratios[-1]:.2f}"),
        *(f"{value:.2f}" for value in p50s),
        *(f"{value:.3f}" for value in used),
    ]


def _median(values: Sequence[float]) -> float:
    return statistics.median(values)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--output", type=Path, default=HERE / "results" / "transport")
    parser.add_argument("settings", nargs="*", help="of our server: access_log=FILE")
    options = parser.parse_args(arguments)
    program = tritonserver(HERE.parent)
    if program is None:
        sys.exit(MISSING)
    with our_server(options.settings) as ours, real_server(program) as real:
        cells, loads = measure(ours, real, options.pairs, options.seconds)
    report = TransportReport(
        created=time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime()),
        code=this_code(),
        machine=this_machine(),
        settings=tuple(options.settings),
        loads=loads,
        cells=cells,
    )
    write_pair(report, markdown(report), options.output.with_suffix(".json"))
    print(markdown(report))


if __name__ == "__main__":
    main()
