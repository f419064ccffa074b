"""Compare loraplex and other servers: the same work, one table.

python benchmarks/compare.py benchmarks/results/tiny --peer transformers=.venv
"""

import asyncio
import importlib.util
import os
from pathlib import Path
from typing import Annotated

import typer

from loraplex.cli.bench import RunBar
from loraplex.cli.options import errors_to_exit_code
from loraplex.core.environment import cache_directory
from loraplex.core.errors import ConfigError

_WORKLOADS = "W1,W2,W3,W4,W5"
_WEIGHTS = "32,16,8"
_WIDTHS = ("32", "16", "8")
_GGUF = "gguf:"
_NEEDED = ("aiohttp", "matplotlib")


def compare(
    output: Annotated[
        Path,
        typer.Argument(
            help="Path of the results, without suffix: .jsonl is the journal (what it has is not "
            "measured again), with it come .json, .md and .svg."
        ),
    ],
    model: Annotated[
        str,
        typer.Option(help="tiny (56M), small (853M), qwen2.5-1.5b or llama-3.1-8b (GGUF only)."),
    ] = "tiny",
    workloads: Annotated[
        str,
        typer.Option(
            help="Of W1 to W6, held and tax, or one of these, such as W3-8; by commas. "
            "Large models have W1 to W4 in a short form, and held."
        ),
    ] = _WORKLOADS,
    weights: Annotated[
        str,
        typer.Option(
            help="Widths in bits (32, 16, 8), and gguf:TYPE (such as gguf:Q4_K_M) for one file "
            "that loraplex and llama.cpp both serve, by commas."
        ),
    ] = _WEIGHTS,
    peer: Annotated[
        list[str] | None,
        typer.Option(help="NAME=PATH of another system, repeatable; see benchmarks/README.md."),
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(help="Of all these systems only those whose name has this in it, repeatable."),
    ] = None,
    variant: Annotated[
        list[str] | None,
        typer.Option(
            help="Of the settings of threads of peers try only this one, by its name in reports, "
            "repeatable."
        ),
    ] = None,
    rounds: Annotated[
        int, typer.Option(min=1, help="Each system runs each workload so often.")
    ] = 5,
    threads: Annotated[int | None, typer.Option(min=1, help="Of each system [all cores].")] = None,
    many: Annotated[int, typer.Option(min=6, help="Adapters of W6's large side.")] = 2000,
    restart: Annotated[
        bool, typer.Option(help="One system up at a time, started anew for every round.")
    ] = False,
    budget_seconds: Annotated[
        float | None, typer.Option(min=0, help="After so long no more run begins.")
    ] = None,
    run_seconds: Annotated[float, typer.Option(min=1, help="The longest one run may take.")] = 900,
    fixtures: Annotated[
        Path | None, typer.Option(help="Where models and adapters are made and kept [user cache].")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of prompts and lengths.")] = 0,
) -> None:
    """Compare loraplex with other systems on random-weight models, taking turns in one run.

    Before a system is timed with adapters, its outputs in a mixed batch are checked. Start it again
    with the same OUTPUT to go on after a crash, a signal or a budget.
    """
    with errors_to_exit_code():
        _need_extra()
        # They need the bench extra, and numpy takes time that `--help` need not.
        from comparison.cases import stages  # noqa: PLC0415
        from comparison.comparing import run_comparison  # noqa: PLC0415
        from comparison.fixtures import Fixture  # noqa: PLC0415
        from comparison.interrupts import Interrupted, run_until_signal  # noqa: PLC0415
        from comparison.journal import ComparisonSettings  # noqa: PLC0415
        from comparison.loraplex_system import LoraplexLibrary, LoraplexServer  # noqa: PLC0415
        from comparison.peers import peers  # noqa: PLC0415
        from comparison.runner import TimeLimits  # noqa: PLC0415
        from comparison.shapes import find_shape  # noqa: PLC0415
        from comparison.sizes import SHORT, STANDARD  # noqa: PLC0415

        shape = find_shape(model)
        groups = tuple(_parts(workloads))
        settings = ComparisonSettings(
            model=shape.name,
            num_parameters=shape.num_parameters,
            groups=groups,
            rounds=rounds,
            num_threads=threads or os.cpu_count() or 1,
            num_many=many,
            seed=seed,
            # The memory of a machine rarely holds a large model for every system.
            is_restarting=restart or shape.is_large,
            variants=tuple(variant or ()),
        )
        sizes = SHORT if shape.is_large else STANDARD
        formats = [_weights(text) for text in _parts(weights)]
        if not shape.has_folder_weights and any(not one.startswith(_GGUF) for one in formats):
            raise ConfigError(f"{shape.name} exists as {_GGUF}TYPE only: --weights {_GGUF}Q4_K_M")
        others = peers(dict(_place(text) for text in peer or []), formats)
        ours = [
            way.with_weights(each, others, has_gguf_files=shape.writes_gguf)
            for each in formats
            for way in (LoraplexServer, LoraplexLibrary)
            # With a large model the library is run only where a peer is a library, too.
            if not shape.is_large
            or way.is_http
            or any((peer.weights, peer.is_http) == (each, False) for peer in others)
        ]
        systems = [*ours, *others]
        wanted = [
            system for system in systems if not only or any(part in system.name for part in only)
        ]
        if not wanted:
            names = ", ".join(system.name for system in systems)
            raise ConfigError(f"--only leaves no system of: {names or 'none'}")
        names = ", ".join(system.name for system in wanted)
        with _Bar(f"compares {names} with {shape.name}, {rounds} rounds") as bar:
            comparison = run_comparison(
                wanted,
                Fixture(shape, fixtures or cache_directory() / "bench"),
                stages(groups, many, seed, sizes),
                settings,
                limits=TimeLimits(run_seconds, budget_seconds),
                progress=bar,
                output=output,
                sizes=sizes,
            )
            try:
                paths = asyncio.run(run_until_signal(comparison, bar.say))
            except Interrupted as interrupted:
                bar.say(
                    f"ended by {interrupted}, with all that was started; {output}.jsonl has what "
                    "was measured: the same command goes on from there"
                )
                raise typer.Exit(128 + interrupted.number) from None
        for path in paths:
            if path.suffix == ".md":
                print(path.read_text(encoding="utf-8"), end="")
        for path in paths:
            print(f"wrote {path}")


def _need_extra() -> None:
    for package in _NEEDED:
        if importlib.util.find_spec(package) is None:
            raise ConfigError(f"the comparison needs {package}: pip install 'loraplex[bench]'")


def _parts(text: str) -> list[str]:
    """Each once, in order. Raises ConfigError for none."""
    parts = list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if not parts:
        raise ConfigError(f"{text!r} names nothing")
    return parts


def _weights(text: str) -> str:
    """Return the weights as systems name them: 32-bit, gguf:Q4_K_M. Raises ConfigError."""
    if not (text in _WIDTHS or text.startswith(_GGUF)):
        raise ConfigError(
            f"--weights are {', '.join(_WIDTHS)} (bits) and {_GGUF}TYPE; {text!r} is none"
        )
    return f"{text}-bit" if text in _WIDTHS else text


def _place(text: str) -> tuple[str, Path]:
    name, equals, path = text.partition("=")
    if not (name and equals and path):
        raise ConfigError(f"--peer wants NAME=PATH, got {text!r}")
    return name, Path(path)


class _Bar(RunBar):
    """Implements bench.comparison.Progress."""

    def begin(self, num_runs: int) -> None:
        self.begin_runs(num_runs)

    def doing(self, what: str) -> None:
        self.describe(what)

    def done(self) -> None:
        self.end_run()


if __name__ == "__main__":
    typer.run(compare)
