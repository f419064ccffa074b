"""What `make gpu-check` does: tests/gpu, then 20 measurements, within eight minutes.

Tests that the time did not allow are listed by name of their file; they count as not passed.
"""

import argparse
import contextlib
import functools
import importlib.util
import itertools
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import torch

from gpu import decode, prefill
from gpu.card import Place, arrival_bandwidth, copy_bandwidth, this_place
from gpu.decode import Case
from gpu.journal import CellJournal, Figures, Header
from gpu.rig import Rig, start_seconds
from loraplex.bench.report import markdown_table
from loraplex.core.environment import child_environment

_SECONDS = 480.0
_MEASURING_SECONDS = 150.0
_PYTEST_SECONDS_OVER = 10.0
_DECODE = decode.Plan(("llama-3.1-8b",), (1, 32, 64), (16,), 1024, 20, "bfloat16")
_TINY_DECODE = decode.Plan(("tiny",), (1, 3), (4,), 32, 2, "float32")
_SUMMARY = re.compile(r"(\d+) (passed|failed|errors?|skipped|deselected|xfailed)")


class Tests(msgspec.Struct, frozen=True, kw_only=True):
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    seconds: float = 0.0
    """Seconds of the slowest file."""
    not_run: tuple[str, ...] = ()
    """Files that the time did not allow."""
    failures: tuple[str, ...] = ()

    @property
    def is_good(self) -> bool:
        return not (self.failed or self.not_run) and self.passed > 0


class CheckReport(msgspec.Struct, frozen=True, kw_only=True):
    place: Place
    tests: Tests
    rows: dict[str, Figures]
    missing: dict[str, str]
    """What was to be measured, and why it was not."""


RunFile = Callable[[Path, float, str, int], Tests]
"""Runs a file of tests: its path, seconds, the marker, processes."""


def run_tests(
    folder: Path,
    seconds: float,
    marker: str,
    num_cores: int,
    *,
    run_file: RunFile | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Tests:
    """File by file, so that what one breaks is its own, and until the time is over.

    What takes time is compiling, on one core each. So files run side by side, and the tests of a
    file in several processes where pytest-xdist is installed. run_file: as _run_file.
    """
    deadline = clock() + seconds
    files = sorted(folder.rglob("test_*.py"))
    at_once = max(1, min(len(files), num_cores))
    processes = num_cores // at_once if importlib.util.find_spec("xdist") else 1

    def run(file: Path) -> Tests:
        left = deadline - clock()
        if left <= 1:
            return Tests(not_run=(str(file),))
        return (run_file or _run_file)(file, left, marker, processes)

    total = Tests()
    with ThreadPoolExecutor(at_once) as pool:
        results = list(pool.map(run, files))
    for found in results:
        total = Tests(
            passed=total.passed + found.passed,
            failed=total.failed + found.failed,
            skipped=total.skipped + found.skipped,
            seconds=max(total.seconds, found.seconds),
            not_run=total.not_run + found.not_run,
            failures=total.failures + found.failures,
        )
    return total


def _run_file(file: Path, seconds: float, marker: str, processes: int) -> Tests:
    ini = Path(__file__).parent / "pytest.ini"
    command = [
        *(sys.executable, "-m", "pytest", "-c", str(ini), "--rootdir", str(Path.cwd())),
        *("-q", "-m", marker, "-p", "no:cacheprovider", str(file)),
    ]
    if processes > 1:
        command += ["-p", "xdist.plugin", "-n", str(processes)]
    # Plugins that happen to be installed there would run the tests in another way.
    environment = child_environment() | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    start = time.monotonic()
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired as error:
        _show(error.stdout)
        return Tests(seconds=time.monotonic() - start, not_run=(str(file),))
    print(done.stdout[-6000:] if done.returncode else done.stdout.strip().splitlines()[-1])
    counts = {
        name.rstrip("s"): int(number) for number, name in _SUMMARY.findall(done.stdout[-300:])
    }
    failed = counts.get("failed", 0) + counts.get("error", 0)
    is_broken = done.returncode not in (0, 1, 5)  # 5: nothing was selected
    return Tests(
        passed=counts.get("passed", 0),
        failed=max(failed, int(is_broken or (done.returncode == 1 and not failed))),
        skipped=counts.get("skipped", 0),
        seconds=time.monotonic() - start,
        failures=tuple(re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)),
    )


def _show(output: bytes | str | None) -> None:
    if output:
        print(output.decode(errors="replace") if isinstance(output, bytes) else output)


def measure(journal: CellJournal, device: torch.device, plan: decode.Plan) -> None:
    """Twenty rows, on one rig."""
    model, batches = plan.models[0], plan.batches
    journal.measure("copy", lambda: {"bytes_per_second": copy_bandwidth(device)})
    journal.measure("arrival", lambda: {"bytes_per_second": arrival_bandwidth(device)})
    if not journal.begins(keys(plan), start_seconds(device)):
        return
    rig = decode.make_rig(device, plan, model, max(batches), 1 << 20)
    try:
        for case, handles in _cases(rig, plan):
            decode.measure_case(journal, rig, plan, case, handles)
        for number, length in _prompts(plan):
            for kind, handles in (("none", []), ("one", rig.load(1, plan.ranks[0], "all"))):
                step = functools.partial(prefill.step, rig, number, length, handles)
                journal.measure(f"{model} prefill {number}x{length} {kind}", step, 10)
        journal.measure("adapter copies", lambda: _copies(rig, plan), 10)
    finally:
        rig.close()


def keys(plan: decode.Plan) -> list[str]:
    """Return what `measure` measures."""
    model, rank = plan.models[0], plan.ranks[0]
    found = ["copy", "arrival", *(Case(model, batch, "none").key for batch in plan.batches)]
    for modules, batch in itertools.product(("qkv", "all"), plan.batches):
        found.append(Case(model, batch, "one", rank, modules).key)
        if batch > 1:
            found.append(Case(model, batch, "distinct", rank, modules).key)
    for number, length in _prompts(plan):
        found += [f"{model} prefill {number}x{length} {kind}" for kind in ("none", "one")]
    return [*found, "adapter copies"]


def _prompts(plan: decode.Plan) -> tuple[tuple[int, int], ...]:
    """Return numbers of prompts in a step, and their lengths."""
    return (1, plan.context // 2), (min(4, plan.batches[-1]), plan.context // 4)


def _cases(rig: Rig, plan: decode.Plan) -> Iterator[tuple[Case, list[int]]]:
    model, rank = plan.models[0], plan.ranks[0]
    for batch in plan.batches:
        yield Case(model, batch, "none"), []
    for modules in ("qkv", "all"):
        count = min(max(plan.batches), rig.most_adapters(rank, modules))
        handles = rig.load(count, rank, modules)
        for batch in plan.batches:
            yield Case(model, batch, "one", rank, modules), handles
            if batch > 1:
                yield Case(model, batch, "distinct", rank, modules), handles


def _copies(rig: Rig, plan: decode.Plan) -> Figures:
    """Adapters of all modules, from the host to the pool, one after another."""
    rank = plan.ranks[0]
    count = min(8, rig.most_adapters(rank, "all"))
    start = time.perf_counter()
    rig.load(count, rank, "all")
    return {"ms_each": 1e3 * (time.perf_counter() - start) / count}


def table(rows: dict[str, Figures]) -> str:
    lines = []
    for key, found in rows.items():
        step = found.get("step_ms", found.get("ms_each"))
        share, speed = found.get("share_of_floor"), found.get("tokens_per_second")
        ratio = _ratio(key, rows)
        bandwidth = found.get("bytes_per_second")
        lines.append(
            (
                key,
                f"{bandwidth / 1e12:.3f} TB/s" if bandwidth else f"{step:.3f} ms",
                "" if speed is None else f"{speed:.0f}",
                "" if share is None else f"{share:.0%}",
                "" if ratio is None else f"{ratio:.3f}",
            )
        )
    return markdown_table(("measured", "median", "tok/s", "of floor", "to no LoRA"), lines)


def _ratio(key: str, rows: dict[str, Figures]) -> float | None:
    """Ratio of steps with adapters to steps of the same size without."""
    head = re.split(r" (?:one|distinct)", key)[0]
    base = rows.get(f"{head} none")
    if head == key or base is None:
        return None
    return rows[key]["step_ms"] / base["step_ms"]


def _measured(
    journal: CellJournal, plan: decode.Plan, work: Callable[[], None], missing: dict[str, str]
) -> dict[str, Figures]:
    """What can be measured, even if a kernel fails: the tests report why."""
    try:
        work()
    except Exception as error:
        missing["the rest"] = f"{type(error).__name__}: {error}"[:500]
    missing |= {cell.key: cell.missing for cell in journal.cells.values() if cell.missing}
    journal.leave_out(keys(plan), missing.get("the rest", "the check ended before"))
    missing |= journal.left_out
    return {cell.key: cell.figures for cell in journal.cells.values() if not cell.missing}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tests", type=Path, default=Path("tests/gpu"))
    parser.add_argument("--seconds", type=float, default=_SECONDS)
    parser.add_argument("--tiny", action="store_true", help="on the processor: to test the check")
    parser.add_argument("--marker", default="gpu")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    start = time.monotonic()
    device = torch.device("cpu" if arguments.tiny else "cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        sys.exit("torch sees no GPU here; --tiny tests the check itself")
    place, plan = this_place(device), _TINY_DECODE if arguments.tiny else _DECODE
    reserved = _MEASURING_SECONDS if device.type == "cuda" else _PYTEST_SECONDS_OVER
    num_cores = 1 if arguments.tiny else os.cpu_count() or 1
    seconds = arguments.seconds - reserved
    tests = run_tests(arguments.tests, seconds, arguments.marker, num_cores)
    commit = (place.code.commit or "unknown")[:7]
    output = arguments.output or Path(f"benchmarks/results/gpu-check-{commit}.json")
    journal_path = output.with_suffix(".jsonl")
    with contextlib.suppress(FileNotFoundError):
        journal_path.unlink()
    left = arguments.seconds - (time.monotonic() - start)
    journal = CellJournal(journal_path, Header(place=place, settings={}), left - 5)
    missing: dict[str, str] = {}
    rows = _measured(journal, plan, lambda: measure(journal, device, plan), missing)
    report = CheckReport(place=place, tests=tests, rows=rows, missing=missing)
    output.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1))
    journal_path.unlink()
    print(show(report))
    return not (tests.is_good and "the rest" not in missing)


def show(report: CheckReport) -> str:
    place, tests = report.place, report.tests
    versions = ", ".join(
        f"{name} {value}" for name, value in (place.versions | place.card.told).items()
    )
    lines = [
        "",
        f"{place.card.name}, commit {place.code.commit}"
        f"{' with changes' if place.code.is_modified else ''}; {versions}",
        table(report.rows),
        *(f"not measured: {key}: {why}" for key, why in report.missing.items()),
        *(f"failed: {name}" for name in tests.failures),
        *(f"not run, for want of time: {name}" for name in tests.not_run),
        f"tests: {tests.passed} passed, {tests.failed} failed, {tests.skipped} skipped, "
        f"{len(tests.not_run)} files not run, in {tests.seconds:.0f} s",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
