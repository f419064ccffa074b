"""`loraplex quantize`: a copy of a model with int4 or int8 weights."""

import enum
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from loraplex.cli.options import errors_to_exit_code
from loraplex.core.byte_sizes import parse_bytes, readable_bytes
from loraplex.core.errors import ConfigError

if TYPE_CHECKING:
    from loraplex.execution.quantizing.report import QuantizeReport

_GROUP_SIZES: Final = (0, 16, 32, 64, 128, 256, 512)


_LARGE_ERRORS: Final = {4: 0.15, 8: 0.02}
"""Relative errors of all weights, by bits, above which something is unusual. Weights that are
distributed normally have 0.09 with int4 in groups of 128, and 0.007 with int8."""


class _Precision(enum.StrEnum):
    INT4 = "int4"
    INT8 = "int8"

    @property
    def bits(self) -> int:
        return int(self.value.removeprefix("int"))

    @property
    def group_size(self) -> int:
        return {_Precision.INT4: 128, _Precision.INT8: 0}[self]


def quantize(
    model: Annotated[str, typer.Argument(help="Hugging Face folder or hub id.")],
    out: Annotated[Path, typer.Argument(help="Folder to write: new, or empty.")],
    to: Annotated[_Precision, typer.Option(help="Type of the weights.", show_default=False)],
    calibrate: Annotated[
        Path | None,
        typer.Option(
            help="File with texts like those of the later use: paragraphs, or .jsonl with "
            '{"text": ...} or {"messages": [...]} in each line. The errors of their results are '
            "minimised instead of those of the weights.",
            show_default=False,
        ),
    ] = None,
    calibrate_tokens: Annotated[
        int, typer.Option(min=1, help="Maximum number of tokens of these texts.")
    ] = 32768,
    group_size: Annotated[
        int | None,
        typer.Option(
            help="Inputs that share a scale, a power of 2 from 16 to 512; 0: all of an output. "
            "Default: 128 for int4, 0 for int8.",
            show_default=False,
        ),
    ] = None,
    max_shard_size: Annotated[str, typer.Option(help="Maximum size of a file.")] = "4GiB",
    report: Annotated[
        Path | None, typer.Option(help="File for the report as JSON.", show_default=False)
    ] = None,
) -> None:
    """Write a copy of a model with int4 or int8 weights (compressed-tensors), for loraplex, vLLM
    and transformers.

    The embedding, the output layer, norms and routers stay as they are.
    """
    with errors_to_exit_code():
        size = to.group_size if group_size is None else group_size
        if size not in _GROUP_SIZES:
            raise ConfigError(
                f"--group-size must be one of {', '.join(map(str, _GROUP_SIZES))}, got {size}"
            )
        shard_bytes = _shard_bytes(max_shard_size)
        from loraplex.app.quantize import Calibration, quantize  # noqa: PLC0415 - torch
        from loraplex.execution.quantizing.rounding import IntegerForm  # noqa: PLC0415 - torch

        found, note = quantize(
            model,
            out,
            IntegerForm(to.bits, size or None),
            None if calibrate is None else Calibration(calibrate, calibrate_tokens),
            shard_bytes,
        )
        _print_report(found)
        print(note)
        print(f"wrote {out}: {readable_bytes(found.written_bytes)}")
        print(f"verdict: {verdict(found, to.bits, is_calibrated=calibrate is not None)}")
        if report is not None:
            _write_report(report, found)


def verdict(report: "QuantizeReport", bits: int, *, is_calibrated: bool) -> str:
    """Return what the errors mean, and what makes them smaller."""
    worst = max(report.layers, key=lambda layer: layer.error.relative_weight)
    is_int4 = bits == _Precision.INT4.bits
    calibrate = "--calibrate FILE makes those of the outputs smaller"
    if report.total.relative_weight > _LARGE_ERRORS[bits]:
        advice = "--to int8 or a smaller --group-size" if is_int4 else "a smaller --group-size"
        return (
            f"large errors for int{bits}, the largest in {worst.name}: outputs will differ. Use "
            f"{advice}{'' if is_calibrated else f'; {calibrate}'}"
        )
    hint = f"; {calibrate}" if is_int4 and not is_calibrated else ""
    return f"usual errors for int{bits}{hint}. Evaluate it on your task before others use it"


def _shard_bytes(text: str) -> int:
    try:
        size = parse_bytes(text)
    except ValueError as error:
        raise ConfigError(f"--max-shard-size: {error}") from error
    if size < 1:
        raise ConfigError(f"--max-shard-size must be positive, got {text}")
    return size


def _print_report(report: "QuantizeReport") -> None:
    width = max(len(layer.name) for layer in report.layers)
    print(f"{'layer':{width}}  {'shape':>13}  {'group':>5}  {'weights':>8}  {'outputs':>8}")
    for layer in report.layers:
        shape = f"{layer.shape[0]} x {layer.shape[1]}"
        group = layer.group_size or "all"
        errors = f"{layer.error.relative_weight:8.3%}  {_percent(layer.error.relative_output)}"
        print(f"{layer.name:{width}}  {shape:>13}  {group:>5}  {errors}")
    total = report.total
    errors = f"{total.relative_weight:8.3%}  {_percent(total.relative_output)}"
    print(f"{'all':{width}}  {'':13}  {'':5}  {errors}")
    print("weights, outputs: relative errors in the 2-norm")
    before, after = map(readable_bytes, (report.source_bytes, report.written_bytes))
    print(f"{before} before, {after} after")


def _percent(value: float | None) -> str:
    return f"{'-':>8}" if value is None else f"{value:8.3%}"


def _write_report(path: Path, report: "QuantizeReport") -> None:
    try:
        path.write_text(json.dumps(report.as_json(), indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error
