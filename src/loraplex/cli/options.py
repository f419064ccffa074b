"""What the commands share: their options, and errors as one line on standard error."""

import contextlib
import sys
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from loraplex.core.errors import ConfigError, LoraplexError

SERVER_URL = "http://127.0.0.1:8000"
Url = Annotated[str, typer.Option(help="The server's address.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the server's answer as it is.")]


def parse_adapters(specs: list[str]) -> dict[str, dict[str, Any]]:
    """`NAME=PATH` or `NAME=PATH,task_id=N`, as [models.X.adapters] would say it.

    A NAME of digits is its task id too.
    """
    adapters: dict[str, dict[str, Any]] = {}
    for spec in specs:
        name, equals, rest = spec.partition("=")
        path, comma, option = rest.partition(",task_id=")
        if not (name and equals and path):
            raise ConfigError(f"--adapter wants NAME=PATH or NAME=PATH,task_id=N, got {spec!r}")
        if name in adapters:
            raise ConfigError(f"--adapter names {name!r} twice")
        adapters[name] = {"path": path}
        if comma:
            if not option.isascii() or not option.isdigit():
                raise ConfigError(f"--adapter {name}: task_id must be an integer, got {option!r}")
            adapters[name]["task_id"] = int(option)
    return adapters


@contextlib.contextmanager
def errors_to_exit_code() -> Iterator[None]:
    """An error of ours becomes a line and exit code 1, not a traceback."""
    try:
        yield
    except LoraplexError as error:
        print(f"loraplex: {error.message}", file=sys.stderr)
        raise typer.Exit(1) from error
