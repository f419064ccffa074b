"""`loraplex compat`: the commands and programs of the systems that loraplex replaces.

The flags of convert-checkpoint, build and launch-triton-server are those of the original scripts,
in their spelling: compat.flags reads them. convert-lora and extract-lora have the flags of
TensorRT-LLM's hf_lora_convert.py and llgtrt's extract_lora.py.
"""

import functools
import importlib
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from typer.core import TyperCommand

from loraplex.adapters.formats.storage_type import StorageType
from loraplex.cli.command_table import CommandGroup, CommandRow, add_commands, group_in_order
from loraplex.cli.llgtrt import llgtrt
from loraplex.cli.options import errors_to_exit_code
from loraplex.cli.triton import triton_app
from loraplex.compat.client.programs import PROGRAMS, Program
from loraplex.compat.convert.flag_tables import BUILD_FLAGS, CHECKPOINT_FLAGS
from loraplex.compat.flags import FlagKind, Flags, UsageError, here, ignored, read_flags
from loraplex.core.errors import ConfigError

if TYPE_CHECKING:
    from loraplex.compat.convert.adapters import PeftAdapter, Written


_TEXT, _WHOLE, _SWITCH = FlagKind.TEXT, FlagKind.WHOLE, FlagKind.SWITCH
_TRITONSERVER: Final = "/opt/tritonserver/bin/tritonserver"
_LOG_FILE: Final = "triton_log.txt"
_ONE_PROCESS: Final = "one process serves the model, without MPI"
LAUNCH_FLAGS: Final = (
    here("world_size", _WHOLE, "more than 1 needs LORAPLEX_TENSOR_PARALLEL_SIZE [1]"),
    here("tritonserver", _TEXT, "a program to start instead of loraplex compat triton"),
    here("grpc_port", _WHOLE, "[8001]"),
    here("http_port", _WHOLE, "[8000]"),
    here("metrics_port", _WHOLE, "[8002]"),
    here("force", _SWITCH, "though a server runs already", "f"),
    here("log", _SWITCH, f"write a detailed log to --log-file [{_LOG_FILE}]"),
    here("log_file", _TEXT, "with --log: where"),
    here("model_repo", _TEXT, "the model repository"),
    ignored("tensorrt_llm_model_name", _TEXT, _ONE_PROCESS),
    ignored("no_mpi", _SWITCH, _ONE_PROCESS),
    ignored("multi_model", _SWITCH, "several models are always served"),
    ignored("disable_spawn_processes", _SWITCH, _ONE_PROCESS),
    ignored("multimodal_gpu0_cuda_mem_pool_bytes", _WHOLE, "no such pool is needed"),
    ignored("oversubscribe", _SWITCH, _ONE_PROCESS),
)


def fill_template(
    file_path: Annotated[Path, typer.Argument(help="A template, such as a config.pbtxt.")],
    substitutions: Annotated[str, typer.Argument(help="NAME:VALUE,NAME:VALUE")],
    in_place: Annotated[
        bool, typer.Option("-i", "--in_place", "--in-place", help="Write the file.")
    ] = False,
) -> None:
    """Fill the `${name}` of a template (fill_template.py)."""
    from loraplex.compat.triton.model_folder import read_text  # noqa: PLC0415 - protobuf
    from loraplex.compat.triton.tools import (  # noqa: PLC0415 - numpy
        filled,
        parse_substitutions,
        write_filled,
    )

    with errors_to_exit_code():
        text = filled(read_text(file_path), parse_substitutions(substitutions), str(file_path))
        if in_place:
            write_filled(file_path, text)
        else:
            sys.stdout.write(text)


def launch_triton_server(context: typer.Context) -> None:
    """Start `loraplex compat triton` in the background and return (launch_triton_server.py)."""
    from loraplex.compat.triton.tools import Launch, launch  # noqa: PLC0415 - seldom needed

    with errors_to_exit_code():
        flags = read_flags(
            *(LAUNCH_FLAGS, context.args, "loraplex compat launch-triton-server"),
            "Start loraplex compat triton in the background and return.",
        )
        repository = flags.get("model_repo")
        if repository is None:
            raise ConfigError("--model_repo is missing: the model repository to serve")
        if flags.get("world_size", 1) < 1:
            raise ConfigError(f"--world_size must be at least 1, got {flags.get('world_size')}")
        program = flags.get("tritonserver")
        what = Launch(
            model_repository=Path(repository),
            grpc_port=flags.get("grpc_port", 8001),
            http_port=flags.get("http_port", 8000),
            metrics_port=flags.get("metrics_port", 8002),
            log_file=Path(flags.get("log_file", _LOG_FILE)) if flags.get("log") else None,
            program=None if program == _TRITONSERVER else program,
        )
        pid = launch(what, force=flags.get("force", False))
        if flags.get("world_size", 1) > 1:
            print(
                f"--world_size {flags.get('world_size')}: one process serves the model, unless "
                "LORAPLEX_TENSOR_PARALLEL_SIZE is set"
            )
        print(f"started with process id {pid}: {' '.join(what.command)}")


TAKES_ALL_FLAGS = {
    "allow_extra_args": True,
    "ignore_unknown_options": True,
    "help_option_names": [],
}
"""Context settings of a command whose flags are read by a table."""


def convert_checkpoint(context: typer.Context) -> None:
    """A Hugging Face folder as a checkpoint for `loraplex compat build` (convert_checkpoint.py)."""
    with errors_to_exit_code():
        flags = read_flags(
            *(CHECKPOINT_FLAGS, context.args, "loraplex compat convert-checkpoint"),
            "A Hugging Face folder as a checkpoint folder for loraplex compat build.",
        )
        _log(flags)
        from loraplex.compat.convert import checkpoint  # noqa: PLC0415 - torch

        checkpoint.log_without_effect(flags)
        print(f"wrote {checkpoint.convert_checkpoint(flags)}")


def build(context: typer.Context) -> None:
    """An engine folder, which `loraplex serve` takes (trtllm-build, build.py)."""
    with errors_to_exit_code():
        flags = read_flags(
            *(BUILD_FLAGS, context.args, "loraplex compat build"),
            "An engine folder for loraplex serve, of a checkpoint or a Hugging Face folder.",
        )
        _log(flags)
        from loraplex.compat.convert import checkpoint, engine  # noqa: PLC0415 - torch

        checkpoint.log_without_effect(flags)
        folder = engine.build_engine_folder(flags)
        print("nothing was written" if folder is None else f"wrote {folder}")


def _log(flags: Flags) -> None:
    """Set up logging at --log_level, with TensorRT-LLM's names of levels."""
    level = str(flags.get("log_level", "info")).upper()
    known = {"VERBOSE": "DEBUG", "INTERNAL_ERROR": "CRITICAL"}
    levels = logging.getLevelNamesMapping()
    logging.basicConfig(
        level=levels.get(known.get(level, level), logging.INFO),
        format="%(levelname).1s %(name)s: %(message)s",
    )


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


_USAGE_ERROR = 2

client_app = CommandGroup(
    help="The client programs of the original systems, with their flags and printed lines. Their "
    "key is read from LORAPLEX_API_KEY, or from the file of LORAPLEX_API_KEY_FILE.",
    no_args_is_help=True,
)


class _RawCommand(TyperCommand):
    """Command that gets its words unread; click would drop the `--` in front of values."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.args = list(args)
        return []


def add_program(group: typer.Typer, program: Program) -> None:
    """Add the command of a program."""

    def command(context: typer.Context) -> None:
        name = f"loraplex compat client {program.command}"
        with errors_to_exit_code():
            try:
                options = read_flags(
                    program.flags, context.args, name, program.help, takes_any_word=True
                )
            except UsageError as error:
                print(error.message, file=sys.stderr)
                raise typer.Exit(_USAGE_ERROR) from error
            module = importlib.import_module(f"loraplex.compat.client.{program.module}")
            code = module.run(options, functools.partial(print, flush=True))
        if code:
            raise typer.Exit(code)

    group.command(program.command, cls=_RawCommand, help=program.help)(command)


for _program in PROGRAMS:
    add_program(client_app, _program)


_SERVERS: Final = "Servers and their clients"
_FILES: Final = "Files"
_RAW: Final = {"context_settings": TAKES_ALL_FLAGS}

COMMANDS: Final = (
    CommandRow("triton", triton_app, _SERVERS),
    CommandRow("llgtrt", llgtrt, _SERVERS),
    CommandRow("launch-triton-server", launch_triton_server, _SERVERS, _RAW),
    CommandRow("client", client_app, _SERVERS),
    CommandRow("build", build, _FILES, _RAW),
    CommandRow("convert-checkpoint", convert_checkpoint, _FILES, _RAW),
    CommandRow("convert-lora", convert_lora, _FILES),
    CommandRow("extract-lora", extract_lora, _FILES),
    CommandRow("fill-template", fill_template, _FILES),
)

app = CommandGroup(
    cls=group_in_order(COMMANDS),
    help="Servers, clients and tools of Triton, TensorRT-LLM and llgtrt, with their flags.",
    no_args_is_help=True,
)
add_commands(app, COMMANDS)
