"""`loraplex replay`: compares the scheduler's plans with those of an iteration log."""

import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from tqdm import tqdm

from loraplex.engine.journal import PlanMade
from loraplex.engine.journal_file import JournalError, JournalLine, JournalReader

if TYPE_CHECKING:
    from loraplex.engine.replay import ReplayDifference, ReplaySummary

MAX_CHANGES = 20
"""Maximum number of listed differences between two plans."""


def replay(
    log: Annotated[Path, typer.Argument(help="File written by --iteration-log.")],
    check_every: Annotated[
        int,
        typer.Option(min=1, help="Steps between two checks of the scheduler's state."),
    ] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Run a log's requests through the scheduler, without a model, and compare every plan.

    Exit code 1: a plan differs, or the scheduler failed; 2: the file is not a complete log.
    """
    # No other command should wait for the import of the scheduler.
    from loraplex.engine.replay import ReplayRefusedError  # noqa: PLC0415
    from loraplex.engine.replay import replay as replay_journal  # noqa: PLC0415

    logging.disable(logging.CRITICAL)  # steps that failed then fail again
    try:
        reader = JournalReader(log)
        with tqdm(
            total=reader.num_bytes, desc="replay", unit="B", unit_scale=True, disable=None
        ) as bar:
            summary = replay_journal(
                reader.header,
                reader,
                lambda line: bar.update(line.num_bytes),
                check_every=check_every,
            )
    except (JournalError, ReplayRefusedError) as error:
        print(f"loraplex: {error}", file=sys.stderr)
        raise typer.Exit(2) from error
    finally:
        logging.disable(logging.NOTSET)
    if as_json:
        print(msgspec.json.encode({"is_torn": reader.is_torn, **_numbers(summary)}).decode())
    else:
        _print_summary(reader, summary)
    if summary.difference is not None:
        raise typer.Exit(1)


def _numbers(summary: "ReplaySummary") -> dict[str, Any]:
    numbers = {name: getattr(summary, name) for name in summary.__dataclass_fields__}
    numbers["difference"] = None if summary.difference is None else _where(summary.difference)
    return numbers


def _print_summary(reader: JournalReader, summary: "ReplaySummary") -> None:
    print(
        f"{summary.steps} steps ({summary.failed_steps} failed), {summary.requests} requests, "
        f"{summary.aborts} aborts, {summary.preemptions} preemptions, {summary.adapter_loads} "
        "adapter loads"
    )
    if reader.is_torn:
        print("the last line is torn, which happens when an engine is killed; it was left out")
    if summary.is_cut:
        print("the log ends within a step")
    if summary.difference is None:
        print("every plan is the log's")
    else:
        _print_difference(summary.difference)


def _print_difference(difference: "ReplayDifference") -> None:
    line = difference.line
    print(_where(difference))
    logged = line.entry.plan if isinstance(line.entry, PlanMade) else None
    planned = difference.planned
    if logged is None and planned is None:
        return
    if logged is not None and planned is not None:
        changes = list(_changes("plan", msgspec.to_builtins(logged), msgspec.to_builtins(planned)))
        print("\n".join(f"  {change}" for change in changes[:MAX_CHANGES]))
        if len(changes) > MAX_CHANGES:
            print(f"  and {len(changes) - MAX_CHANGES} more")
    print(f"in the log: {msgspec.json.encode(logged).decode()}")
    print(f"planned:    {msgspec.json.encode(planned).decode()}")


def _where(difference: "ReplayDifference") -> str:
    line: JournalLine = difference.line
    return f"{line.path}, line {line.number}: {difference.problem}"


def _changes(name: str, logged: Any, planned: Any) -> Iterator[str]:
    """`plan.rows[2].num_tokens: 3 in the log, now 4`."""
    if isinstance(logged, dict) and isinstance(planned, dict):
        for key in dict.fromkeys((*logged, *planned)):
            yield from _changes(f"{name}.{key}", logged.get(key), planned.get(key))
    elif isinstance(logged, list | tuple) and isinstance(planned, list | tuple):
        if len(logged) != len(planned):
            yield f"{name}: {len(logged)} in the log, now {len(planned)}"
        for index, (ours, theirs) in enumerate(zip(logged, planned, strict=False)):
            yield from _changes(f"{name}[{index}]", ours, theirs)
    elif logged != planned:
        yield f"{name}: {logged} in the log, now {planned}"
