"""`loraplex bench`: measure a server over its wire protocol, and what its adapters cost."""

import asyncio
import importlib.util
import sys
import threading
from collections.abc import Coroutine
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Any, Final, Self

import typer
from tqdm import tqdm

from loraplex.bench.settings import BenchSettings
from loraplex.bench.workload import Workload, parse_arrivals, parse_lengths, parse_popularity
from loraplex.cli.command_table import CommandGroup, GroupFlagPage
from loraplex.cli.options import errors_to_exit_code
from loraplex.core.clock import Clock, SystemClock
from loraplex.core.errors import ConfigError
from loraplex.demo import BASE_PATH

if TYPE_CHECKING:
    from loraplex.bench.report import Report


_BAR_SECONDS: Final = 1.0
_LINE_SECONDS: Final = 10.0


class RunBar:
    """A bar on a terminal, which moves each second; elsewhere, a line every 10 seconds."""

    def __init__(self, plan: str, clock: Clock | None = None) -> None:
        """Print what will be done. clock: None for the system's."""
        self._clock = clock or SystemClock()
        self._start_ns = self._runs_start_ns = self._clock.now_ns()
        self._what = "starting"
        self._num_done = self._num_runs = 0
        # disable=None: only on a terminal.
        self._bar = tqdm(desc=self._what, unit="run", leave=False, disable=None)
        self._is_over = threading.Event()
        self._ticking = threading.Thread(target=self._tick, name="progress", daemon=True)
        self.say(plan)

    def __enter__(self) -> Self:
        self._ticking.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._is_over.set()
        self._ticking.join()
        self._bar.close()

    def say(self, line: str) -> None:
        """Print a line above the bar."""
        self._bar.write(line, file=sys.stderr)

    def begin_runs(self, num_runs: int) -> None:
        self._num_runs, self._runs_start_ns = num_runs, self._clock.now_ns()
        self._bar.reset(num_runs)
        self.describe("measuring")
        self.say(f"{num_runs} runs; the time left is known after the first one")

    def describe(self, what: str) -> None:
        """Set the description of what is being done."""
        self._what = what
        self._bar.set_description(what)

    def end_run(self, what: str = "") -> None:
        """Count one more run, of this workload."""
        self._num_done += 1
        self._bar.set_postfix_str(what, refresh=False)
        self._bar.update()

    def line(self) -> str:
        """Return what has been done, and the time that is left."""
        now_ns = self._clock.now_ns()
        passed = f"{(now_ns - self._start_ns) / 1e9:.0f} s"
        if not self._num_runs:
            return f"{self._what}, {passed} so far"
        done = f"{self._what}: {self._num_done} of {self._num_runs} runs in {passed}"
        if not self._num_done:
            return done
        seconds = (now_ns - self._runs_start_ns) / 1e9 / self._num_done
        return f"{done}, about {seconds * (self._num_runs - self._num_done):.0f} s left"

    def _tick(self) -> None:
        while not self._is_over.wait(_LINE_SECONDS if self._bar.disable else _BAR_SECONDS):
            if self._bar.disable:
                self.say(self.line())
            else:
                self._bar.refresh()


_LOADS = ("closed:1", "closed:8", "closed:32")
_POPULARITIES = ("identical", "distinct")
_NUM_ADAPTERS = 32
_SHIPPED_MODEL = "capitals"


_ServeFlags = Annotated[
    list[str] | None,
    typer.Argument(help="Flags for the measured `loraplex serve`, after --."),
]
_Url = Annotated[
    str | None,
    typer.Option(
        help="Address of a running server, which is measured as it is. Its key is read from "
        "LORAPLEX_API_KEY, or from the file of LORAPLEX_API_KEY_FILE."
    ),
]
_Model = Annotated[
    Path | None,
    typer.Option(help="Model to serve with random adapters (default: the shipped model)."),
]
_Adapters = Annotated[
    int | None,
    typer.Option(min=0, help="Number of adapters; 0: base only (default: 32, or all of --url)."),
]
_Load = Annotated[
    list[str] | None,
    typer.Option(
        help="Load: closed:CONCURRENCY, burst or poisson:RATE; repeatable (default: closed:1, "
        "closed:8 and closed:32)."
    ),
]
_Popularity = Annotated[
    list[str] | None,
    typer.Option(
        help="Popularity of adapters: identical, uniform, distinct or zipf:S; repeatable "
        "(default: identical and distinct)."
    ),
]
_Requests = Annotated[
    int | None,
    typer.Option(min=1, help="Requests in a run (default: twice the concurrency, at least 8)."),
]


def bench_run(
    serve_flags: _ServeFlags = None,
    url: _Url = None,
    model: _Model = None,
    adapters: _Adapters = None,
    rank: Annotated[int, typer.Option(min=1, help="Rank of the random adapters.")] = 8,
    load: _Load = None,
    popularity: _Popularity = None,
    requests: _Requests = None,
    prompt_tokens: Annotated[
        str, typer.Option(help="Length of prompts: N, or LOW-HIGH for a uniform distribution.")
    ] = "32",
    output_tokens: Annotated[
        str, typer.Option(help="Length of outputs: N, or LOW-HIGH for a uniform distribution.")
    ] = "32",
    repeats: Annotated[
        int, typer.Option(min=1, help="Number of measured passes, after a warm-up.")
    ] = 3,
    seed: Annotated[int, typer.Option(min=0, help="Seed of all random choices.")] = 0,
    output: Annotated[
        Path | None, typer.Option(help="Folder for the report, as JSON and Markdown.")
    ] = None,
) -> None:
    """Measure throughput and latency: with the base model alone, then with adapters.

    Without --url it starts a server of its own. Exit code 1 if a request failed.
    """
    with errors_to_exit_code():
        settings = BenchSettings(
            loads=tuple(map(parse_arrivals, load or _LOADS)),
            popularities=tuple(map(parse_popularity, popularity or _POPULARITIES)),
            num_adapters=_NUM_ADAPTERS if adapters is None else adapters,
            num_requests=requests,
            prompt_tokens=parse_lengths(prompt_tokens),
            output_tokens=parse_lengths(output_tokens),
            repeats=repeats,
            seed=seed,
        )
        target = url or _own_target(model, settings.num_adapters, rank)
        with _Bar(_plan(target, settings)) as bar:
            if url is None:
                session = _own_server(model, settings, bar, rank, serve_flags or [])
            elif model is None and not serve_flags:
                session = _running_server(url, settings, bar, all_adapters=adapters is None)
            else:
                raise ConfigError("--url is a running server: give no --model and no serve flags")
            report = asyncio.run(session)
        _show(report, output)


Session = Coroutine[Any, Any, "Report"]


def _own_server(
    model: Path | None, settings: BenchSettings, bar: "_Bar", rank: int, serve_flags: list[str]
) -> Session:
    _need_aiohttp()
    from loraplex.bench.session import bench_model  # noqa: PLC0415 (the bench extra)

    folder = BASE_PATH if model is None else model
    name = _SHIPPED_MODEL if model is None else model.resolve().name
    return bench_model(folder, settings, bar, rank=rank, name=name, serve_flags=serve_flags)


def _running_server(
    url: str, settings: BenchSettings, bar: "_Bar", *, all_adapters: bool
) -> Session:
    _need_aiohttp()
    from loraplex.bench.session import bench_url  # noqa: PLC0415 (the bench extra)

    return bench_url(url, settings, bar, all_adapters=all_adapters)


def _need_aiohttp() -> None:
    if importlib.util.find_spec("aiohttp") is None:
        raise ConfigError("loraplex bench needs aiohttp: pip install 'loraplex[bench]'")


def _show(report: "Report", output: Path | None) -> None:
    """Print the report and write it. Raises typer.Exit if a request failed."""
    from loraplex.bench.report import markdown, write_report  # noqa: PLC0415 - slow import

    print(markdown(report), end="")
    if output is not None:
        for path in write_report(report, output):
            print(f"wrote {path}")
    if report.num_failed:
        raise typer.Exit(1)


def _own_target(model: Path | None, num_adapters: int, rank: int) -> str:
    name = f"the shipped model {_SHIPPED_MODEL}" if model is None else str(model)
    return f"a new server with {name} and {num_adapters} random adapters of rank {rank}"


def _plan(target: str, settings: BenchSettings) -> str:
    """Return a description of what will be measured."""
    groups = settings.groups()
    loads = ", ".join(str(group[0].arrivals) for group in groups)
    popularities = ", ".join(str(workload.popularity) for workload in groups[0])
    num_requests = sum(workload.num_requests for group in groups for workload in group)
    return (
        f"measures {target}: {loads}, each with {popularities}; {num_requests} requests in a pass, "
        f"1 pass to warm up and {settings.repeats} that count"
    )


class _Bar(RunBar):
    """Implements `BenchProgress`."""

    def begin(self, num_runs: int) -> None:
        self.begin_runs(num_runs)

    def done(self, workload: Workload) -> None:
        self.end_run(f"{workload.arrivals}, {workload.popularity}")


class _RunsByDefault(GroupFlagPage):
    """Group in which `bench --load burst` means `bench run --load burst`, and so its help."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args or args[0] not in self.commands:
            args = ["run", *args]
        return super().parse_args(ctx, args)


bench_app = CommandGroup(cls=_RunsByDefault)


@bench_app.callback()
def _bench() -> None:
    """Measure throughput and latency: with the base model alone, then with adapters."""


bench_app.command("run")(bench_run)
