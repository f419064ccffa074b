"""The `loraplex` command."""

from typing import Annotated

import typer

from loraplex.cli import adapters, client, keys
from loraplex.cli.bench import bench_app
from loraplex.cli.build import TAKES_ALL_FLAGS, build, convert_checkpoint
from loraplex.cli.compare import compare
from loraplex.cli.convert import convert_lora, extract_lora
from loraplex.cli.generate import generate
from loraplex.cli.help_page import FlagPage
from loraplex.cli.llgtrt import llgtrt
from loraplex.cli.plan import plan
from loraplex.cli.replay import replay
from loraplex.cli.serve import serve
from loraplex.cli.triton import triton_app
from loraplex.cli.triton_tools import fill_template, launch_triton_server
from loraplex.cli.vllm_flags import VllmFlagPage
from loraplex.core.environment import leave_grpc_out_of_forks
from loraplex.core.version import __version__

app = typer.Typer(
    name="loraplex",
    help="Serve one base model with thousands of LoRA adapters.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
app.command(cls=VllmFlagPage)(serve)
app.command(cls=FlagPage)(llgtrt)
app.command()(generate)
app.command()(compare)
app.command(cls=FlagPage)(plan)
app.command()(replay)
app.command()(convert_lora)
app.command()(extract_lora)
app.command(context_settings=TAKES_ALL_FLAGS)(convert_checkpoint)
app.command(context_settings=TAKES_ALL_FLAGS)(build)
app.command()(fill_template)
app.command(context_settings=TAKES_ALL_FLAGS)(launch_triton_server)
app.add_typer(bench_app, name="bench")
app.add_typer(adapters.app, name="adapters")
app.add_typer(keys.app, name="keys")
app.add_typer(triton_app, name="triton")
app.add_typer(client.app, name="client")


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
