"""The `loraplex` command."""

from typing import Annotated, Final

import typer

from loraplex.cli import adapters, cache, compat, keys
from loraplex.cli.bench import bench_app
from loraplex.cli.command_table import (
    OF_VERBS,
    CommandGroup,
    CommandRow,
    add_commands,
    group_in_order,
)
from loraplex.cli.compare import compare
from loraplex.cli.doctor import doctor
from loraplex.cli.generate import generate
from loraplex.cli.plan import plan
from loraplex.cli.quantize import quantize
from loraplex.cli.replay import replay
from loraplex.cli.run import run
from loraplex.cli.serve import ServePage, serve
from loraplex.core.environment import leave_grpc_out_of_forks
from loraplex.core.version import __version__

_SERVE: Final = "Serve"
_STATE: Final = "Models, adapters, keys and caches"
_MEASURE: Final = "Measure and plan"
_OTHERS: Final = "Other systems"

COMMANDS: Final = (
    CommandRow("serve", serve, _SERVE, {"cls": ServePage}),
    CommandRow("run", run, _SERVE),
    CommandRow("generate", generate, _SERVE),
    CommandRow("compare", compare, _SERVE),
    CommandRow("adapters", adapters.app, _STATE),
    CommandRow("keys", keys.app, _STATE),
    CommandRow("cache", cache.app, _STATE),
    CommandRow("quantize", quantize, _STATE),
    CommandRow("plan", plan, _MEASURE),
    CommandRow("doctor", doctor, _MEASURE),
    CommandRow("bench", bench_app, _MEASURE),
    CommandRow("replay", replay, _MEASURE),
    CommandRow("compat", compat.app, _OTHERS),
)

app = CommandGroup(
    name="loraplex",
    cls=group_in_order(COMMANDS, OF_VERBS),
    help="Serve one base model with thousands of LoRA adapters.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["--help", "-h"]},
    pretty_exceptions_enable=False,
)
add_commands(app, COMMANDS)
# The names that these commands had before they became a group.
add_commands(app, compat.COMMANDS, is_hidden=True)


def _print_version(is_given: bool) -> None:
    if is_given:
        print(f"loraplex {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Serve one base model with thousands of LoRA adapters."""
    del version
    leave_grpc_out_of_forks()
