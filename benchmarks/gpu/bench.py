"""The benchmark of the GPU backend in parts, each of some minutes.

    make gpu-bench PART=a

a: decode steps, b: published traces, c: transformers and peft, d: loads of adapters, e: prefill, f:
vLLM, if it is there. Weights are random and made on the device. A part writes what it found as it
goes; started again, it goes on where it was. What the time does not allow is listed with the
reason. `--tiny` runs a part on the processor with a tiny model: to test the benchmark itself, its
figures mean nothing.
"""

import argparse
import os
import sys
import threading
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch

from gpu import decode, loads, prefill, reference, traces, vllm_peer
from gpu.card import this_place
from gpu.journal import Cell, CellJournal, Header
from loraplex.bench.machine import Code
from loraplex.core.errors import ConfigError

PARTS: dict[str, types.ModuleType] = {
    "a": decode,
    "b": traces,
    "c": reference,
    "d": loads,
    "e": prefill,
    "f": vllm_peer,
}
_SECONDS = 450.0
"""A part is to end within eight minutes, its start included."""
_GRACE_SECONDS = 15.0
"""What a part that hangs, or misjudges its last figure, has beyond that."""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    part: str
    header: Header
    cells: tuple[Cell, ...]
    left_out: dict[str, str]
    """Why figures are missing that another start may measure."""


def run_part(
    part: str,
    device: torch.device,
    path: Path,
    *,
    tiny: bool,
    seconds: float,
    clock: Callable[[], float] = time.monotonic,
) -> Report:
    """Measure what is missing in the journal at `path`, as far as the seconds allow."""
    journal = _journal(part, device, path, tiny=tiny, seconds=seconds, clock=clock)
    module = PARTS[part]
    module.run(journal, device, _plan(part, tiny=tiny))
    return _report(part, journal, tiny=tiny, reason="the part ended before")


def expired(part: str, device: torch.device, path: Path, *, tiny: bool) -> Report:
    """Return the report of a part that did not end in time: what is in its journal."""
    journal = _journal(part, device, path, tiny=tiny, seconds=0.0, clock=time.monotonic)
    return _report(part, journal, tiny=tiny, reason="the part did not end in time")


def _plan(part: str, *, tiny: bool) -> Any:
    return PARTS[part].TINY if tiny else PARTS[part].FULL


def _journal(
    part: str,
    device: torch.device,
    path: Path,
    *,
    tiny: bool,
    seconds: float,
    clock: Callable[[], float],
) -> CellJournal:
    settings = {"part": part, "plan": msgspec.json.encode(_plan(part, tiny=tiny)).decode()}
    header = Header(place=this_place(device), settings=settings)
    return CellJournal(path, header, seconds, clock)


def _report(part: str, journal: CellJournal, *, tiny: bool, reason: str) -> Report:
    """reason: why a figure is missing for which the part has none."""
    journal.leave_out(PARTS[part].keys(_plan(part, tiny=tiny)), reason)
    return Report(
        part=part,
        header=journal.header,
        cells=tuple(journal.cells.values()),
        left_out=journal.left_out,
    )


def show(report: Report, path: Path, *, tiny: bool) -> str:
    """The table of a part, below what it was made with."""
    module, plan = PARTS[report.part], _plan(report.part, tiny=tiny)
    journal = CellJournal(path, report.header, 0.0)
    card, details = report.header.place.card, report.header.place.card.told
    versions = ", ".join(
        f"{name} {version}" for name, version in report.header.place.versions.items()
    )
    lines = [
        f"part {report.part}: {(module.__doc__ or '').split(':', 1)[-1].strip().splitlines()[0]}",
        f"{_code(report.header.place.code)}; {card.name}; {versions}",
        ", ".join(f"{name} {value}" for name, value in details.items()),
        *_bandwidths(journal),
        "",
        module.table(journal, plan),
    ]
    missing = {cell.key: cell.missing for cell in report.cells if cell.missing}
    lines += [f"not measured: {key}: {reason}" for key, reason in missing.items()]
    lines += [f"not run: {key}: {reason}" for key, reason in report.left_out.items()]
    if report.left_out:
        lines += ["", f"{len(report.left_out)} cells are left: run the part again."]
    return "\n".join(line for line in lines if line is not None)


def _code(code: Code) -> str:
    changes = " with changes" if code.is_modified else ""
    return f"loraplex {code.version}, commit {code.commit}{changes}"


def _bandwidths(journal: CellJournal) -> list[str]:
    return [
        f"{key}: {cell.figures['bytes_per_second'] / 1e12:.3f} TB/s"
        for key in ("copy", "arrival")
        if (cell := journal.cells.get(key))
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("part", choices=sorted(PARTS))
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--seconds", type=float, default=_SECONDS)
    parser.add_argument("--output", type=Path, help="a name without suffix")
    arguments = parser.parse_args()
    device = torch.device("cpu" if arguments.tiny else "cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        sys.exit("torch sees no GPU here; --tiny tests the benchmark itself")
    place = this_place(device)
    commit = (place.code.commit or "unknown")[:7]
    name = f"gpu-bench-{'tiny-' if arguments.tiny else ''}{commit}-{arguments.part}"
    output = arguments.output or Path("benchmarks/results") / name
    journal = output.with_name(output.name + ".jsonl")

    def finish(report: Report) -> None:
        encoded = msgspec.json.format(msgspec.json.encode(report), indent=1)
        output.with_name(output.name + ".json").write_bytes(encoded)
        print(show(report, journal, tiny=arguments.tiny), flush=True)

    def end() -> None:
        # Whatever hangs holds this process: it cannot end in order.
        finish(expired(arguments.part, device, journal, tiny=arguments.tiny))
        os._exit(1)

    timer = threading.Timer(arguments.seconds + _GRACE_SECONDS, end)
    timer.daemon = True
    timer.start()
    try:
        report = run_part(
            arguments.part, device, journal, tiny=arguments.tiny, seconds=arguments.seconds
        )
    except ConfigError as error:
        sys.exit(str(error))
    timer.cancel()
    finish(report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
