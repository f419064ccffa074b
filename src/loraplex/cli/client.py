"""`loraplex compat client`: the client programs of the original systems, with their own flags."""

import importlib
import sys
from typing import Any

import typer
from typer.core import TyperCommand

from loraplex.cli.options import errors_to_exit_code
from loraplex.compat.client.programs import PROGRAMS, Program
from loraplex.compat.flags import UsageError, read_flags

_USAGE_ERROR = 2

app = typer.Typer(
    help="The client programs of the original systems, with their flags and printed lines.",
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
            code = module.run(options, _print_line)
        if code:
            raise typer.Exit(code)

    group.command(program.command, cls=_RawCommand, help=program.help)(command)


def _print_line(line: str) -> None:
    print(line, flush=True)


for _program in PROGRAMS:
    add_program(app, _program)
