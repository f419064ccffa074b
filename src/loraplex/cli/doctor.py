"""`loraplex doctor`: the machine, its limits, and a check of the kernels on it."""

from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from loraplex.cli.options import errors_to_exit_code, print_table
from loraplex.cli.serve import build_config
from loraplex.cli.settings_flags import with_settings
from loraplex.core.byte_sizes import readable_bytes

if TYPE_CHECKING:
    from loraplex.app.doctor import Diagnosis
    from loraplex.execution.checking.verdict import Finding, Verdict

_NAMES = {"repeat": "recorded steps"}


@with_settings(
    *("dtype", "kv_dtype", "quantization", "device", "block_size", "batch_invariant"),
    *("attention_backend", "cuda_graphs", "max_lora_rank", "max_lora_ranks", "num_threads"),
    *("tensor_parallel_size", "max_attention_window_size", "sink_token_length"),
    *("state_dir", "kernel_check_dir"),
)
def doctor(
    model: Annotated[
        str,
        typer.Argument(help="Hugging Face folder or hub id; without it a small model is checked."),
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    **settings: Any,
) -> None:
    """Show what the machine has, and check every kernel that a model uses against torch.

    No weights are read. A server with the same model and settings takes the result.
    Exit code 2: a kernel fails, or nothing could be checked.
    """
    with errors_to_exit_code():
        config = build_config(model, None, None, [], [], settings)
        from loraplex.app.doctor import diagnose  # noqa: PLC0415 - torch

        (named,) = config.models.values()
        found = diagnose(msgspec.structs.replace(named, path=model), config.server.state_dir)
    if as_json:
        print(msgspec.json.encode(found).decode())
    else:
        _print_machine(found)
        _print_verdict(found)
    if found.verdict is None or found.verdict.fallen:
        raise typer.Exit(2)


def _print_machine(found: "Diagnosis") -> None:
    host, gpu = found.host, found.gpu
    memory = "" if host.memory_bytes is None else f", {readable_bytes(host.memory_bytes)}"
    rows = {
        "versions": ", ".join(f"{name} {value}" for name, value in found.versions.items()),
        "processor": f"{host.processor}, {host.num_cores} cores{memory}",
        "threads": str(host.num_threads),
        "instruction sets": ", ".join(host.instruction_sets) or "not known",
        "kernels of the CPU": host.kernels,
        "copies in memory": f"{host.copied_bytes_per_second / 1e9:.1f} GB/s",
        **{f"limit of {name}": value for name, value in host.limits.items()},
    }
    if gpu is not None:
        free = f"{readable_bytes(gpu.free_bytes)} of {readable_bytes(gpu.memory_bytes)} free"
        rows["GPU"] = f"{gpu.name}, compute capability {gpu.capability}, {free}"
        rows["copies in the GPU"] = f"{gpu.copied_bytes_per_second / 1e9:.0f} GB/s"
    width = max(map(len, rows))
    for name, value in rows.items():
        print(f"{name.ljust(width)}  {value}")
    print()


def _print_verdict(found: "Diagnosis") -> None:
    verdict = found.verdict
    if verdict is None:
        print(f"the kernels could not be checked: {found.not_checked}")
        return
    print_table(
        ("KERNEL", "RESULT", "CALLS", "DIFFERENCE", "DETAIL"),
        [_row(finding) for finding in verdict.findings],
    )
    print()
    print(_summary(verdict, found.model or "a small model"))
    if verdict.not_checked:
        print(f"not checked: {', '.join(verdict.not_checked)}")
    _print_tuning(verdict)
    for finding in verdict.fallen:
        print(f"please report this line: {verdict.report(finding)}")


def _print_tuning(verdict: "Verdict") -> None:
    """Print which sizes of programs were measured, if any were."""
    tuning = verdict.tuning
    if tuning.measured:
        print()
        rows = []
        for one in tuning.measured:
            result = "chosen" if tuning.sizes.get(one.name) == one.size else ""
            ratio = "not measured" if one.ratio is None else f"{one.ratio:.2f}"
            rows.append((one.name, one.size, ratio, one.problem or result))
        print_table(("SIZE", "CANDIDATE", "TIME TO OURS", ""), rows)
        print()
    if tuning.not_done:
        print(f"sizes of programs: {tuning.not_done}")
    for problem in tuning.problems:
        print(f"please report this line: size {problem} ({verdict.described_place})")


def _row(finding: "Finding") -> tuple[str, ...]:
    name = _NAMES.get(finding.op, finding.op)
    if finding.fault is not None:
        return name, finding.fault, "", "", finding.detail
    difference = f"{finding.difference:.1e}" if finding.difference else "0"
    return name, "ok", str(finding.num_calls), difference, ""


def _summary(verdict: "Verdict", model: str) -> str:
    total, fallen = len(verdict.findings), len(verdict.fallen)
    text = f"{total - fallen} of {total} kernels agree with torch on {model}"
    return f"{text}, checked in {verdict.seconds:.0f} s"
