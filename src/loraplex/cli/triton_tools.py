"""`loraplex compat fill-template` and `launch-triton-server`: tools of Triton's users."""

import sys
from pathlib import Path
from typing import Annotated, Final

import typer

from loraplex.cli.options import errors_to_exit_code
from loraplex.compat.flags import FlagKind, here, ignored, read_flags
from loraplex.core.errors import ConfigError

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
    from loraplex.compat.triton.pbtxt import read_text  # noqa: PLC0415 - protobuf
    from loraplex.compat.triton.template_filling import (  # noqa: PLC0415 - numpy
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
    from loraplex.compat.triton.launching import Launch, launch  # noqa: PLC0415 - seldom needed

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
