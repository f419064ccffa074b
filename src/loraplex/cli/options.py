"""Options, output and errors that the commands have in common."""

import contextlib
import json
import sys
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from loraplex.core.errors import ConfigError, LoraplexError

SERVER_URL = "http://127.0.0.1:8000"
Url = Annotated[str, typer.Option(help="Address of the server.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the server's JSON.")]


def print_json(value: Any) -> None:
    """Print a value for programs, and for people who read JSON."""
    print(json.dumps(value, indent=2, ensure_ascii=False))


def parse_adapters(specs: list[str]) -> dict[str, dict[str, Any]]:
    """Parse `NAME=PATH` and `NAME=PATH,task_id=N` into the table [models.X.adapters].

    A NAME of digits is its task id, too.
    """
    adapters: dict[str, dict[str, Any]] = {}
    for spec in specs:
        name, equals, rest = spec.partition("=")
        path, comma, option = rest.partition(",task_id=")
        if not (name and equals and path):
            raise ConfigError(f"--adapter must be NAME=PATH or NAME=PATH,task_id=N, got {spec!r}")
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
    """Turn a LoraplexError into one line on standard error and exit code 1, without a traceback."""
    try:
        yield
    except LoraplexError as error:
        print(f"loraplex: {error.message}", file=sys.stderr)
        raise typer.Exit(1) from error
