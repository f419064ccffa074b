"""How long things take to begin: the import, --help, a server until it is ready. A table, or JSON.

    python benchmarks/startup.py [--model FOLDER] [--repeats 5] [--json FILE] [-- SERVE FLAGS]

Every figure is the least of the repeats, each a new process, of which the first compiles modules
where they are not; so is its processor time, with that of the processes that it started, which
other work on the machine disturbs less. A first start has an empty state directory, so it packs the
weights; a second finds them packed.
"""

import argparse
import contextlib
import json
import os
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from loraplex.bench.machine import this_machine
from loraplex.core.environment import child_environment
from loraplex.demo import BASE_PATH

POLL_SECONDS = 0.01
START_SECONDS = 600.0
PORT_FLAGS = ("--http-port", "--grpc-port", "--metrics-port")


class Lap(NamedTuple):
    seconds: float
    processor_seconds: float


def environment() -> dict[str, str]:
    """Variables of a user's processes: Python keeps what it compiled, as in an installation."""
    return {k: v for k, v in child_environment().items() if k != "PYTHONDONTWRITEBYTECODE"}


def of_command(*arguments: str) -> Lap:
    """Time from the start of a Python process to its end."""
    with measured() as finish:
        command = [sys.executable, *arguments]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment())
    return finish(time.perf_counter())


def of_server(model: Path, state_dir: Path, flags: Sequence[str]) -> Lap:
    """Time from the start of `loraplex serve` until /v2/health/ready; processor time to its end."""
    ports = [str(port) for port in free_ports(len(PORT_FLAGS))]
    places = [text for pair in zip(PORT_FLAGS, ports, strict=True) for text in pair]
    quiet = ["--state-dir", str(state_dir), "--log-level", "warning"]
    command = [sys.executable, "-m", "loraplex", "serve", str(model), *places, *quiet, *flags]
    with measured() as finish:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment())
        try:
            wait_until_ready(f"http://127.0.0.1:{ports[0]}/v2/health/ready", process)
            ready = time.perf_counter()
        finally:
            process.terminate()
            process.wait()
    return finish(ready)


def wait_until_ready(url: str, process: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + START_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5) as response:
            if response.status == 200:
                return
        time.sleep(POLL_SECONDS)
    sys.exit(f"the server did not become ready (exit code {process.poll()})")


@contextlib.contextmanager
def measured() -> Iterator[Callable[[float], Lap]]:
    """A function from the moment that counts to the lap since now."""
    start, used = time.perf_counter(), processor_seconds()
    yield lambda end: Lap(end - start, processor_seconds() - used)


def processor_seconds() -> float:
    """Processor time of all child processes that have ended, and of theirs."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [
            stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)
        ]
        return [one.getsockname()[1] for one in sockets]


def measure(model: Path, repeats: int, flags: Sequence[str]) -> dict[str, Lap]:
    """Every figure's least, in turns: what disturbs one repeat disturbs all figures."""
    laps: dict[str, list[Lap]] = {}
    for _ in range(repeats):
        state_dir = Path(tempfile.mkdtemp(prefix="loraplex-startup-"))
        try:
            turn = {
                "import torch": of_command("-c", "import torch"),
                "import loraplex": of_command("-c", "import loraplex"),
                "loraplex --help": of_command("-m", "loraplex", "--help"),
                "ready, first start": of_server(model, state_dir, flags),
                "ready, second start": of_server(model, state_dir, flags),
            }
        finally:
            shutil.rmtree(state_dir)
        for name, lap in turn.items():
            laps.setdefault(name, []).append(lap)
    return {name: Lap(*map(min, zip(*found, strict=True))) for name, found in laps.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=BASE_PATH)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("flags", nargs="*", help="more flags for `loraplex serve`, after --")
    options = parser.parse_args()
    laps = measure(options.model, options.repeats, options.flags)
    print(f"least of {options.repeats}; load average {os.getloadavg()[0]:.1f}\n")
    print("| | seconds | processor seconds |\n|---|---|---|")
    for name, lap in laps.items():
        print(f"| {name} | {lap.seconds:.2f} | {lap.processor_seconds:.2f} |")
    if options.json:
        machine = this_machine()
        found = {
            "cpu": machine.cpu_model,
            "num_cores": machine.num_cores,
            "model": options.model.name,
            "repeats": options.repeats,
            "laps": {name: lap._asdict() for name, lap in laps.items()},
        }
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
