"""`loraplex compat convert-checkpoint` and `build`: TensorRT-LLM's two steps to an engine folder.

The flags are those of its scripts, in their spelling: convert.flags reads them.
"""

import logging

import typer

from loraplex.cli.options import errors_to_exit_code
from loraplex.compat.convert.flag_tables import BUILD_FLAGS, CHECKPOINT_FLAGS
from loraplex.compat.flags import Flags, read_flags

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
