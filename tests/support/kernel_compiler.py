"""Compiles the Triton kernels ahead of time, as a GPU would for the cases in kernel_cases.

`python -m support.kernel_compiler --arch 90 --what lora,attention` prints what each kernel
needs: registers, stack, shared memory, and how wide it loads. It needs no GPU. A kernel is compiled
once for all launches that are specialised alike; Triton keeps what it compiled in its cache.
"""

import argparse
import dataclasses
import json
import multiprocessing
import sys
import time
from collections.abc import Sequence
from typing import Any

import triton

from support.fake_gpu import GPUS
from support.kernel_cases import GROUPS, cases_of
from support.kernel_launches import KernelLaunch, LaunchRecorder
from support.kernel_resources import KernelResources, resources_of

_COLUMNS = "{:<30} {:<34} {:>5} {:>5} {:>6} {:>7} {:>6} {:<24} {:<14} {:>5}"
_HEADINGS = ("kernel", "case", "warps", "regs", "spill", "shared", "wide", "loads", "matrix", "s")


@dataclasses.dataclass(frozen=True, slots=True)
class CompiledKernel:
    group: str
    kernel: str
    cases: tuple[str, ...]
    arch: int
    num_warps: int
    num_stages: int
    constants: dict[str, str]
    launches: int
    seconds: float
    resources: KernelResources | None
    """None: it does not compile."""
    error: str = ""


def compile_groups(
    groups: Sequence[str], arch: int, match: str = "", processes: int = 1, *, fewest: bool = False
) -> list[CompiledKernel]:
    """Compile every kernel that is launched by cases of these groups with `match` in the name.

    fewest: leave out a kernel each of whose constants has had its value in an earlier one.
    """
    launches = {group: _launches(group, arch, match) for group in groups}
    jobs = [(group, same) for group in groups for same in _by_key(launches[group])]
    if fewest:
        jobs = _with_new_values(jobs)
    # Forked processes have the jobs already: what a job names cannot travel.
    context = multiprocessing.get_context("fork")
    _JOBS.clear()
    _JOBS.extend((group, arch, same) for group, same in jobs)
    if processes <= 1:
        return [_compile(index) for index in range(len(jobs))]
    with context.Pool(processes) as pool:
        return pool.map(_compile, range(len(jobs)), chunksize=1)


_JOBS: list[tuple[str, int, list[KernelLaunch]]] = []


def _launches(group: str, arch: int, match: str) -> list[KernelLaunch]:
    recorder, cases = LaunchRecorder(arch), cases_of(group, arch, match)
    with recorder.record():
        for name, launch in cases.items():
            recorder.case = name
            launch()
    return recorder.launches


def _by_key(launches: Sequence[KernelLaunch]) -> list[list[KernelLaunch]]:
    groups: dict[str, list[KernelLaunch]] = {}
    for launch in launches:
        groups.setdefault(launch.key, []).append(launch)
    return list(groups.values())


Job = tuple[str, list[KernelLaunch]]


def _with_new_values(jobs: Sequence[Job]) -> list[Job]:
    seen: set[tuple[str, str]] = set()
    kept = []
    for group, same in jobs:
        constants = same[0].source.constants.items()
        values = {(same[0].name, repr(constant)) for constant in constants}
        if not values or values - seen:
            kept.append((group, same))
            seen |= values
    return kept


def _compile(index: int) -> CompiledKernel:
    group, arch, launches = _JOBS[index]
    launch = launches[0]
    started = time.perf_counter()
    resources, error = None, ""
    try:
        target = triton.runtime.driver.active.get_current_target()
        compiled = triton.compile(launch.source, target=target, options=launch.options)
        resources = resources_of(compiled.asm["cubin"], compiled.metadata.shared)
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
    return CompiledKernel(
        group,
        launch.name,
        tuple(dict.fromkeys(launch.case for launch in launches)),
        arch,
        launch.options["num_warps"],
        launch.options["num_stages"],
        _constants(launch),
        len(launches),
        round(time.perf_counter() - started, 2),
        resources,
        error,
    )


def _constants(launch: KernelLaunch) -> dict[str, str]:
    names = launch.kernel.arg_names
    return {names[path[0]]: str(value) for path, value in launch.source.constants.items()}


def _row(compiled: CompiledKernel) -> tuple[Any, ...]:
    used = compiled.resources
    case = compiled.cases[0] + (f" +{more}" if (more := len(compiled.cases) - 1) else "")
    head = (compiled.kernel[:30], case[:34], compiled.num_warps)
    if used is None:
        return (*head, "-", "-", "-", "-", "does not compile", "-", compiled.seconds)
    loads = " ".join(f"{bits}:{count}" for bits, count in sorted(used.load_bits.items()))
    matrix = " ".join(f"{name}:{count}" for name, count in used.matrix_ops.items())
    spill = used.spill_bytes or used.stack_bytes
    wide = f"{100 * used.wide_share:.0f}%"
    return (*head, used.registers, spill, used.shared_bytes, wide, loads, matrix, compiled.seconds)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--arch", type=int, default=90, choices=sorted(GPUS))
    parser.add_argument(
        "--what", default=",".join(GROUPS), help="comma-separated groups, or module:function"
    )
    parser.add_argument("--match", default="", help="only cases with this in their names")
    parser.add_argument(
        "--fewest", action="store_true", help="each value of a constant once, not all together"
    )
    parser.add_argument("--json", action="store_true", help="JSON instead of a table")
    parser.add_argument("--constants", action="store_true", help="also what each is compiled for")
    parser.add_argument("--processes", type=int, default=2)
    return parser.parse_args()


def main() -> int:
    arguments = _arguments()
    if triton.knobs.runtime.interpret:
        sys.exit("Kernels that are interpreted cannot be compiled: set TRITON_INTERPRET=0.")
    kernels = compile_groups(
        arguments.what.split(","),
        arguments.arch,
        arguments.match,
        arguments.processes,
        fewest=arguments.fewest,
    )
    if arguments.json:
        found = {"triton": triton.__version__, "arch": arguments.arch}
        json.dump(
            found | {"kernels": [dataclasses.asdict(kernel) for kernel in kernels]}, sys.stdout
        )
        return 0
    lines = [_COLUMNS.format(*_HEADINGS)]
    for kernel in kernels:
        lines.append(_COLUMNS.format(*map(str, _row(kernel))))
        if arguments.constants:
            lines.append("    " + " ".join(f"{k}={v}" for k, v in kernel.constants.items()))
        lines += [f"    {line}" for line in kernel.error.splitlines()[-12:]]
    sys.stdout.write("\n".join(lines) + "\n")
    return any(kernel.resources is None for kernel in kernels)


if __name__ == "__main__":
    sys.exit(main())
