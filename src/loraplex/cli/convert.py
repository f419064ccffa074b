"""`loraplex compat convert-lora` and `extract-lora`: PEFT folders in other systems' formats.

The flags are those of TensorRT-LLM's hf_lora_convert.py and llgtrt's extract_lora.py.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from loraplex.adapters.formats.storage_type import StorageType
from loraplex.cli.options import errors_to_exit_code

if TYPE_CHECKING:
    from loraplex.compat.convert.adapters import PeftAdapter, Written

InFile = Annotated[str, typer.Option("-i", "--in-file", help="A PEFT folder.", show_default=False)]
ModelDir = Annotated[
    Path | None,
    typer.Option(
        help="The base model's folder, for the number of its experts and the sizes that an adapter "
        "with one tensor for all experts is read by. Without it the number is that of the outputs "
        "of the adapter's router, else its largest number of an expert and one.",
        show_default=False,
    ),
]
Force = Annotated[bool, typer.Option("--force", help="Overwrite what is there.")]
Verbose = Annotated[bool, typer.Option("--verbose", help="A line for every tensor.")]


def convert_lora(
    in_file: InFile,
    out_dir: Annotated[
        Path, typer.Option("-o", "--out-dir", help="A folder; created.", show_default=False)
    ],
    storage_type: Annotated[
        StorageType, typer.Option(help="The type of the weights.")
    ] = StorageType.FLOAT16,
    model_dir: ModelDir = None,
    force: Force = False,
    verbose: Verbose = False,
) -> None:
    """Write a PEFT adapter as TensorRT-LLM's model.lora_weights.npy and model.lora_config.npy."""
    from loraplex.compat.convert.adapters import write_pair  # noqa: PLC0415 - numpy

    with errors_to_exit_code():
        adapter, num_experts = _read(in_file, model_dir)
        written = write_pair(
            adapter.rows, out_dir, storage_type, num_experts=num_experts, force=force
        )
        _print_report(adapter, written, verbose)


def extract_lora(
    in_file: InFile,
    out_file: Annotated[
        Path, typer.Option("-o", "--out-file", help="A .safetensors file.", show_default=False)
    ],
    dtype: Annotated[
        StorageType | None,
        typer.Option("-t", "--dtype", help="The type of the weights; by default their own."),
    ] = None,
    model_dir: ModelDir = None,
    force: Force = False,
    verbose: Verbose = False,
) -> None:
    """Write a PEFT adapter as llgtrt's .safetensors file with weights and config."""
    from loraplex.compat.convert.adapters import write_lora_file  # noqa: PLC0415 - numpy

    with errors_to_exit_code():
        adapter, num_experts = _read(in_file, model_dir)
        written = write_lora_file(
            adapter.rows, out_file, dtype, num_experts=num_experts, force=force
        )
        _print_report(adapter, written, verbose)


def _read(in_file: str, model_dir: Path | None) -> tuple["PeftAdapter", int | None]:
    """Return the adapter, and the number of the base's experts if its folder is given."""
    from loraplex.compat.convert.adapters import read_peft  # noqa: PLC0415 - numpy

    if model_dir is None:
        return read_peft(in_file), None
    from loraplex.app.builder import base_shapes  # noqa: PLC0415 - torch
    from loraplex.models.registry import read_config  # noqa: PLC0415

    shapes = base_shapes(read_config(model_dir))
    numbers = (number for layer in shapes.layer_forms for number in layer.num_experts.values())
    return read_peft(in_file, shapes), max(numbers, default=None)


def _print_report(adapter: "PeftAdapter", written: "Sequence[Written]", verbose: bool) -> None:
    """What was converted and what was not: nothing, as all else is an error."""
    from loraplex.compat.convert.adapters import describe_rows  # noqa: PLC0415 - numpy

    num_tensors = sum(len(row.tensors) for row in adapter.rows)
    print(f"converted {num_tensors} tensors of {len(adapter.rows)} modules")
    for line in describe_rows(adapter.rows):
        print(f"  {line}")
    if verbose:
        for row in adapter.rows:
            for name, tensor in sorted(row.tensors.items()):
                print(f"  {row.origin}.lora_{name.upper()} {tensor.dtype} {list(tensor.shape)}")
    print("not converted: nothing")
    for warning in adapter.warnings:
        print(f"warning: {warning}")
    for file in written:
        print(f"wrote {file.path}: {file.content}")
