"""One benchmark from nothing to its report: of a running server, or of one that it starts."""

import datetime
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec

from loraplex.bench.client import Target, discover
from loraplex.bench.machine import this_code, this_machine
from loraplex.bench.random_adapters import linear_shapes, write_random_adapters
from loraplex.bench.report import Report, Served
from loraplex.bench.server import running_server, serve_command
from loraplex.bench.settings import Settings
from loraplex.bench.suite import Progress, run_suite


async def bench_url(
    url: str, settings: Settings, progress: Progress, *, all_adapters: bool = False
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
    settings: Settings,
    progress: Progress,
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


async def _report(target: Target, served: Served, settings: Settings, progress: Progress) -> Report:
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
