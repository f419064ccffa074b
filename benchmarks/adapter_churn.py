"""Cost of requests that each may use another adapter, while few of them are in memory.

    python benchmarks/adapter_churn.py [--adapters 2000] [--few 5] [-- SERVE FLAGS]
    python benchmarks/adapter_churn.py --adapters 10000 --used 2000 --popularity zipf:1 \
        --on-device 100 --requests 4000

A closed loop uses every adapter twice, in any order, from a server whose device tier holds
exactly 8 of them and whose host tier 64. As many requests go to a few adapters that stay on the
device. The two take turns, so that a machine that slows down slows both. Prints a table and writes
it, with everything as JSON in a second file; exit code 1 if a response or an adapter was lost.
"""

import argparse
import asyncio
import contextlib
import datetime
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from shutil import copytree
from typing import Any

import httpx
import msgspec
from comparison.adapter_tiers import TierCounters, read_counters
from comparison.churn_report import (
    ChurnReport,
    Side,
    Tiers,
    Turn,
    side_of,
    table,
    write_churn,
)
from comparison.fixtures import RANK_8, Fixture
from comparison.shapes import TINY
from comparison.systems import Adapter

from loraplex.bench.arrivals import ClosedLoop
from loraplex.bench.client import Target, discover, run
from loraplex.bench.machine import this_code, this_machine
from loraplex.bench.session import running_server, serve_command
from loraplex.bench.statistics import throughput_ratio
from loraplex.bench.workload import (
    Lengths,
    PlannedRequest,
    Workload,
    generate,
    parse_popularity,
)
from loraplex.core.environment import cache_directory, child_environment
from loraplex.core.errors import ConfigError

NUM_HOST = 64
NUM_CLIENTS = 8
LENGTHS = Lengths(16, 16)
MAX_MODEL_LEN = 64
START_SECONDS = 600.0
RESULTS = Path(__file__).parent / "results"


class Server:
    """A running `loraplex serve`."""

    def __init__(self, target: Target, metrics_url: str) -> None:
        self.target = target
        self._metrics_url = metrics_url

    async def run(self, workload: Workload, requests: Sequence[PlannedRequest]) -> Turn:
        """Alone: its counters are those of these requests."""
        before = await self._counters()
        start_ns, records = await run(self.target, requests, workload.arrivals)
        return Turn(
            workload=workload,
            start_ns=start_ns,
            adapters=tuple(each.adapter for each in requests if each.adapter is not None),
            records=tuple(records),
            counters=(await self._counters()).since(before),
        )

    async def memory(self) -> dict[str, Any]:
        """What lies where."""
        found: dict[str, dict[str, Any]] = json.loads(await get(f"{self.target.url}/v1/memory"))
        return found[self.target.base]

    async def _counters(self) -> TierCounters:
        return read_counters(await get(self._metrics_url))


async def get(url: str) -> str:
    async with httpx.AsyncClient(trust_env=False, timeout=60) as http:
        return (await http.get(url)).raise_for_status().text


def size_tiers(
    model: Path, adapters: Sequence[Adapter], flags: Sequence[str], num_device: int
) -> Tiers:
    """Size tiers as `loraplex plan` computes, and check that they hold exactly this number."""
    (one,) = plan(model, adapters[:1], flags)["adapters"]
    tiers = Tiers(
        num_device=num_device,
        num_host=NUM_HOST,
        device_bytes=num_device * one["device_bytes"],
        host_bytes=NUM_HOST * one["host_bytes"],
    )
    proof = plan(model, adapters[: max(num_device, NUM_HOST) + 1], [*flags, *tier_flags(tiers)])
    if (proof["fit_device"], proof["fit_host"]) != (num_device, NUM_HOST):
        raise ConfigError(
            f"{tiers} holds {proof['fit_device']} adapters on the device and {proof['fit_host']} "
            "on the host"
        )
    return tiers


def plan(model: Path, adapters: Sequence[Adapter], flags: Sequence[str]) -> dict[str, Any]:
    """Output of `loraplex plan` about the adapters."""
    named = [text for adapter in adapters for text in ("--adapters", str(adapter.path))]
    command = [sys.executable, "-m", "loraplex", "plan", str(model), "--json", *named, *flags]
    done = subprocess.run(command, capture_output=True, text=True, env=child_environment())
    if done.returncode:
        raise ConfigError(f"loraplex plan failed: {done.stderr or done.stdout}")
    found: dict[str, dict[str, Any]] = json.loads(done.stdout)
    return found["adapters"]


def tier_flags(tiers: Tiers) -> list[str]:
    sizes = str(tiers.device_bytes), str(tiers.host_bytes)
    return ["--lora-device-bytes", sizes[0], "--lora-host-bytes", sizes[1]]


def engine_flags(options: argparse.Namespace) -> list[str]:
    """Those that `loraplex plan` has, too."""
    return [
        *("--dtype", options.dtype, "--device", options.device),
        *("--max-lora-rank", str(RANK_8.rank), "--max-num-seqs", str(NUM_CLIENTS)),
        *("--max-model-len", str(MAX_MODEL_LEN)),
    ]


async def measure(fixture: Fixture, options: argparse.Namespace) -> ChurnReport:
    fixture.ensure_model()
    adapters = fixture.adapters(RANK_8, options.adapters)
    tiers = size_tiers(fixture.model, adapters, engine_flags(options), options.on_device)
    own = ["--no-prefix-cache", "--log-level", "error"]
    flags = [*engine_flags(options), *tier_flags(tiers), *own, *options.flags]
    created = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    machine = this_machine()
    start = time.perf_counter()
    async with started(fixture, adapters, flags) as server:
        ready_seconds = time.perf_counter() - start
        few, many = await take_turns(server, tiers, options)
        memory = await server.memory()
        listed = (await discover(server.target.url)).adapters
    return ChurnReport(
        created=created,
        code=this_code(),
        machine=machine,
        model=fixture.model.name,
        serve_flags=tuple(flags),
        tiers=tiers,
        ready_seconds=ready_seconds,
        few=few,
        many=many,
        num_registered=len(adapters),
        throughput_ratio=throughput_ratio(many.runs, few.runs),
        num_listed=len({*listed} & {adapter.name for adapter in adapters}),
        num_on_device=memory["device"]["adapters"],
        num_on_host=memory["host"]["adapters"],
    )


@contextlib.asynccontextmanager
async def started(
    fixture: Fixture, adapters: Sequence[Adapter], flags: Sequence[str]
) -> AsyncIterator[Server]:
    """A server with an empty state and these adapters in its folder."""
    # Where the adapters lie, so that their files can be linked.
    with tempfile.TemporaryDirectory(prefix="churn-", dir=fixture.model.parent) as folder:
        adapter_dir, state_dir = Path(folder, "adapters"), Path(folder, "state")
        for adapter in adapters:
            copytree(adapter.path, adapter_dir / adapter.name, copy_function=os.link)
        port = free_port()
        command = serve_command(
            fixture.model,
            fixture.model.name,
            adapter_dir,
            state_dir,
            [*flags, "--metrics-port", str(port)],
        )
        async with running_server(command, START_SECONDS) as url:
            names = tuple(adapter.name for adapter in adapters)
            found = await discover(url)
            vocabulary = tuple(fixture.vocabulary)
            target = msgspec.structs.replace(found, adapters=names, vocabulary=vocabulary)
            yield Server(target, f"http://127.0.0.1:{port}/metrics")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as one:
        port: int = one.getsockname()[1]
        return port


async def take_turns(
    server: Server, tiers: Tiers, options: argparse.Namespace
) -> tuple[Side, Side]:
    """The few and the many, each in as many turns as there are rounds."""
    few, many = (workload_of(count, options) for count in (options.few, options.used))
    warm_up = msgspec.structs.replace(few, num_requests=4 * NUM_CLIENTS)
    vocabulary = server.target.vocabulary
    turns = [await server.run(warm_up, generate(warm_up, 1, vocabulary))]
    planned = [(workload, generate(workload, 0, vocabulary)) for workload in (few, many)]
    for number in range(options.rounds):
        for workload, requests in planned if number % 2 == 0 else reversed(planned):
            turn = await server.run(workload, share(requests, number, options.rounds))
            turns.append(turn)
            show_progress(f"round {number + 1} of {options.rounds}", turn)
    return side_of(few, turns, tiers), side_of(many, turns, tiers)


def workload_of(num_adapters: int, options: argparse.Namespace) -> Workload:
    return Workload(
        num_requests=options.requests,
        prompt_tokens=LENGTHS,
        output_tokens=LENGTHS,
        popularity=parse_popularity(options.popularity),
        num_adapters=num_adapters,
        arrivals=ClosedLoop(NUM_CLIENTS),
        seed=options.seed,
    )


def share(requests: list[PlannedRequest], number: int, rounds: int) -> list[PlannedRequest]:
    """Requests of one round; each request is in one round only."""
    return requests[len(requests) * number // rounds : len(requests) * (number + 1) // rounds]


def show_progress(place: str, turn: Turn) -> None:
    figures = turn.figures()
    print(
        f"{place}, {turn.workload.num_adapters} adapters: "
        f"{figures.output_tokens_per_second:.0f} tok/s, {turn.counters.loads:.0f} loads, "
        f"{figures.num_failed} lost",
        file=sys.stderr,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--adapters", type=int, default=2000, help="registered")
    parser.add_argument("--used", type=int, help="number of these that requests use [all]")
    parser.add_argument("--popularity", default="shuffled", help="such as zipf:1")
    parser.add_argument("--requests", type=int, help="of each side [two for each used adapter]")
    parser.add_argument("--on-device", type=int, default=8, help="that the device tier holds")
    parser.add_argument("--few", type=int, default=5, help="that stay on the device")
    parser.add_argument("--rounds", type=int, default=4, help="turns of each side")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--fixtures", type=Path, default=cache_directory() / "bench")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder for the report")
    parser.add_argument("flags", nargs="*", help="more flags for `loraplex serve`, after --")
    options = parser.parse_args()
    options.used = options.used or options.adapters
    options.requests = options.requests or 2 * options.used
    most = options.on_device
    if not 0 < options.few <= most or options.adapters <= most + NUM_HOST:
        parser.error(f"--few must be 1 to {most}, --adapters above {most + NUM_HOST}")
    if not 0 < options.used <= options.adapters:
        parser.error("--used must be 1 to the number of --adapters")
    if not 0 < options.rounds <= options.requests:
        parser.error("--rounds must be 1 to the number of requests")
    try:
        report = asyncio.run(measure(Fixture(TINY, options.fixtures), options))
        paths = write_churn(report, options.output)
    except ConfigError as error:
        sys.exit(str(error))
    print(table(report))
    print(*paths, sep="\n", file=sys.stderr)
    return 0 if report.is_whole else 1


if __name__ == "__main__":
    sys.exit(main())
