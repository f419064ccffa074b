"""One benchmark from nothing to its report: of a running server, or of one that it starts."""

import asyncio
import contextlib
import datetime
import re
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from loraplex.bench.arrivals import ClosedLoop
from loraplex.bench.client import Target, discover, run
from loraplex.bench.machine import this_code, this_machine
from loraplex.bench.popularity import BaseOnly, Distinct
from loraplex.bench.random_adapters import linear_shapes, write_random_adapters
from loraplex.bench.report import Report, Served, WorkloadResult
from loraplex.bench.settings import BenchSettings
from loraplex.bench.statistics import (
    RunStatistics,
    median_of_runs,
    summarize,
    throughput_ratio,
)
from loraplex.bench.workload import Lengths, Workload, generate
from loraplex.core.environment import child_environment
from loraplex.core.errors import ConfigError
from loraplex.core.python_process import module_command

_START_SECONDS = 300.0
_STOP_SECONDS = 60.0
HTTP_LINE = re.compile(r"Started HTTPService at (\S+:\d+)")
LAST_LINE = "Started Metrics Service at"


def serve_command(
    model: Path, name: str, adapter_dir: Path, state_dir: Path, flags: Sequence[str]
) -> list[str]:
    """Return the command of a server on free ports. `flags` come last, so they win."""
    places = [str(model), "--name", name, "--adapter-dir", str(adapter_dir)]
    ports = ["--http-port", "0", "--grpc-port", "0", "--metrics-port", "0"]
    quiet = ["--state-dir", str(state_dir), "--log-level", "warning"]
    return [*module_command("loraplex", "serve"), *places, *ports, *quiet, *flags]


@contextlib.asynccontextmanager
async def running_server(
    command: Sequence[str], start_seconds: float = _START_SECONDS
) -> AsyncIterator[str]:
    """Run the command while the context lasts; gives its HTTP address once it is ready.

    Its messages go to our standard error. Its settings are its flags: LORAPLEX_* variables do not
    reach it. Raises ConfigError if it does not start.
    """
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, env=child_environment()
    )
    try:
        yield await _started(process, start_seconds)
    finally:
        await _stop(process)


async def _started(process: asyncio.subprocess.Process, start_seconds: float) -> str:
    try:
        async with asyncio.timeout(start_seconds):
            return await _read_address(process)
    except TimeoutError:
        raise ConfigError(f"the server was not ready within {start_seconds:g} seconds") from None


async def _read_address(process: asyncio.subprocess.Process) -> str:
    assert process.stdout is not None
    url = ""
    async for line in process.stdout:
        text = line.decode(errors="replace")
        if match := HTTP_LINE.search(text):
            url = f"http://{match[1]}"
        if LAST_LINE in text:
            return url
    status = await process.wait()
    raise ConfigError(f"the server ended with status {status} before it was ready")


async def _stop(process: asyncio.subprocess.Process) -> None:
    if process.returncode is not None:
        return
    process.terminate()
    try:
        async with asyncio.timeout(_STOP_SECONDS):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()


_WARM_UP_CONCURRENCY = 8


class BenchProgress(Protocol):
    """Display of the progress."""

    def begin(self, num_runs: int) -> None: ...

    def done(self, workload: Workload) -> None:
        """One more run is over."""
        ...


async def run_suite(
    target: Target, settings: BenchSettings, progress: BenchProgress
) -> tuple[WorkloadResult, ...]:
    """Raises ConfigError if the server cannot take these settings."""
    _check(target, settings)
    progress.begin(settings.num_runs)
    await _warm_up(target, settings)
    groups = settings.groups()
    runs: dict[Workload, list[RunStatistics]] = {w: [] for group in groups for w in group}
    for repeat in range(settings.repeats + 1):
        for workload in _in_turn(groups, repeat):
            figures = await _measure(target, workload, repeat)
            progress.done(workload)
            if repeat > 0:
                runs[workload].append(figures)
    return tuple(
        _result(workload, runs[workload], runs[group[0]]) for group in groups for workload in group
    )


def _in_turn(groups: Sequence[Sequence[Workload]], repeat: int) -> Iterator[Workload]:
    for group in groups:
        first = repeat % len(group)
        yield from group[first:]
        yield from group[:first]


async def _measure(target: Target, workload: Workload, repeat: int) -> RunStatistics:
    requests = generate(workload, repeat, target.vocabulary)
    start_ns, records = await run(target, requests, workload.arrivals)
    return summarize(records, start_ns)


def _result(
    workload: Workload, runs: Sequence[RunStatistics], base_runs: Sequence[RunStatistics]
) -> WorkloadResult:
    is_base = isinstance(workload.popularity, BaseOnly)
    return WorkloadResult(
        workload=workload,
        runs=tuple(runs),
        median=median_of_runs(runs),
        throughput_ratio_to_base=None if is_base else throughput_ratio(runs, base_runs),
    )


def _check(target: Target, settings: BenchSettings) -> None:
    if settings.num_adapters > len(target.adapters):
        raise ConfigError(
            f"{target.url} serves {len(target.adapters)} adapters of {target.base!r}; "
            f"{settings.num_adapters} are requested"
        )
    longest = settings.prompt_tokens.high + settings.output_tokens.high
    if target.max_model_len is not None and longest > target.max_model_len:
        raise ConfigError(
            f"prompt and output together may have {longest} tokens; {target.base!r} takes "
            f"{target.max_model_len}"
        )


async def _warm_up(target: Target, settings: BenchSettings) -> None:
    """One request to every adapter, so that no counted run waits for a load.

    Raises ConfigError if one fails: every run would.
    """
    if not settings.num_adapters:
        return
    arrivals = ClosedLoop(_WARM_UP_CONCURRENCY)
    workload = Workload(
        num_requests=settings.num_adapters,
        prompt_tokens=settings.prompt_tokens,
        output_tokens=Lengths(1, 1),
        popularity=Distinct(),
        num_adapters=settings.num_adapters,
        arrivals=arrivals,
        seed=settings.seed,
    )
    figures = await _measure(target, workload, repeat=0)
    if figures.num_failed:
        raise ConfigError(f"a request to warm up failed: {figures.errors[0]}")


async def bench_url(
    url: str, settings: BenchSettings, progress: BenchProgress, *, all_adapters: bool = False
) -> Report:
    """Measure a running server with adapters of its own.

    all_adapters: all that it serves, whatever the settings. Raises ConfigError.
    """
    target = await discover(url)
    if all_adapters:
        settings = msgspec.structs.replace(settings, num_adapters=len(target.adapters))
    return await _report(target, Served(model=target.base, url=url), settings, progress)


async def bench_model(
    model: Path,
    settings: BenchSettings,
    progress: BenchProgress,
    *,
    rank: int,
    name: str,
    serve_flags: Sequence[str] = (),
) -> Report:
    """Serve a local model folder with random adapters, and measure that. Raises ConfigError."""
    shapes = linear_shapes(model)
    with tempfile.TemporaryDirectory(prefix="loraplex-bench-") as folder:
        adapter_dir, state_dir = Path(folder, "adapters"), Path(folder, "state")
        adapter_dir.mkdir()
        write_random_adapters(
            adapter_dir, shapes, count=settings.num_adapters, rank=rank, seed=settings.seed
        )
        command = serve_command(model, name, adapter_dir, state_dir, serve_flags)
        async with running_server(command) as url:
            served = Served(model=name, url=None, serve_flags=tuple(serve_flags), adapter_rank=rank)
            return await _report(await discover(url), served, settings, progress)


async def _report(
    target: Target, served: Served, settings: BenchSettings, progress: BenchProgress
) -> Report:
    created = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    machine = this_machine()
    results = await run_suite(target, settings, progress)
    return Report(
        created=created,
        code=this_code(),
        machine=machine,
        served=served,
        settings=settings,
        results=results,
    )
