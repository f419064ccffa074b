"""The benchmark of the GPU backend in parts, each of some minutes.

    make gpu-bench PART=a

a: decode steps, b: published traces, c: transformers and peft, d: loads of adapters, e: prefill.
Weights are random and made on the device. A part writes what it found as it goes; started again, it
goes on where it was. `--tiny` runs a part on the processor with a tiny model: to test the benchmark
itself, its figures mean nothing.
"""

import argparse
import sys
import types
from pathlib import Path

import msgspec
import torch

from gpu import decode, loads, prefill, reference, traces
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
}
_SECONDS = 450.0
"""A part is to end within eight minutes, its start included."""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    part: str
    header: Header
    cells: tuple[Cell, ...]
    left_out: tuple[str, ...]


def run_part(part: str, device: torch.device, path: Path, *, tiny: bool, seconds: float) -> Report:
    """Measure what is missing in the journal at `path`."""
    module = PARTS[part]
    plan = module.TINY if tiny else module.FULL
    settings = {"part": part, "plan": msgspec.json.encode(plan).decode()}
    header = Header(place=this_place(device), settings=settings)
    journal = CellJournal(path, header, seconds)
    module.run(journal, device, plan)
    return Report(
        part=part,
        header=header,
        cells=tuple(journal.cells.values()),
        left_out=tuple(journal.left_out),
    )


def show(report: Report, path: Path, *, tiny: bool) -> str:
    """The table of a part, below what it was made with."""
    module = PARTS[report.part]
    plan = module.TINY if tiny else module.FULL
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
    try:
        report = run_part(
            arguments.part, device, journal, tiny=arguments.tiny, seconds=arguments.seconds
        )
    except ConfigError as error:
        sys.exit(str(error))
    encoded = msgspec.json.format(msgspec.json.encode(report), indent=1)
    output.with_name(output.name + ".json").write_bytes(encoded)
    print(show(report, journal, tiny=arguments.tiny))
    return 0


if __name__ == "__main__":
    sys.exit(main())
