"""Writes what a benchmark measured into `results`."""

import json
import time
from pathlib import Path
from typing import Any

import msgspec

from loraplex.bench.machine import machine_lines, this_code, this_machine


def write_report(name: str, title: str, rows: list[dict[str, Any]], text: str) -> None:
    """Write `results/NAME.json` with the rows and `.md` with the text."""
    machine, code = this_machine(), this_code()
    report_time = time.strftime("%Y-%m-%d %H:%M", time.gmtime())
    results = Path(__file__).parent / "results" / name
    report = {"machine": msgspec.to_builtins(machine), "code": msgspec.to_builtins(code)}
    results.with_suffix(".json").write_text(json.dumps(report | {"rows": rows}, indent=1))
    lines = [f"# {title}", "", *machine_lines(report_time, code, machine), ""]
    results.with_suffix(".md").write_text("\n".join([*lines, text]) + "\n")
