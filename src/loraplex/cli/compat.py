"""`loraplex compat`: the commands and programs of the systems that loraplex replaces."""

from typing import Final

import typer

from loraplex.cli import client
from loraplex.cli.build import TAKES_ALL_FLAGS, build, convert_checkpoint
from loraplex.cli.command_table import CommandRow, add_commands, group_in_order
from loraplex.cli.convert import convert_lora, extract_lora
from loraplex.cli.help_page import FlagPage
from loraplex.cli.llgtrt import llgtrt
from loraplex.cli.triton import triton_app
from loraplex.cli.triton_tools import fill_template, launch_triton_server

_SERVERS: Final = "Servers and their clients"
_FILES: Final = "Files"
_RAW: Final = {"context_settings": TAKES_ALL_FLAGS}

COMMANDS: Final = (
    CommandRow("triton", triton_app, _SERVERS),
    CommandRow("llgtrt", llgtrt, _SERVERS, {"cls": FlagPage}),
    CommandRow("launch-triton-server", launch_triton_server, _SERVERS, _RAW),
    CommandRow("client", client.app, _SERVERS),
    CommandRow("build", build, _FILES, _RAW),
    CommandRow("convert-checkpoint", convert_checkpoint, _FILES, _RAW),
    CommandRow("convert-lora", convert_lora, _FILES),
    CommandRow("extract-lora", extract_lora, _FILES),
    CommandRow("fill-template", fill_template, _FILES),
)

app = typer.Typer(
    cls=group_in_order(COMMANDS),
    help="Servers, clients and tools of Triton, TensorRT-LLM and llgtrt, with their flags.",
    no_args_is_help=True,
)
add_commands(app, COMMANDS)
