"""Options, output and errors that the commands have in common."""

import contextlib
import difflib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Final

import typer

from loraplex.core.errors import ConfigError, LoraplexError
from loraplex.demo import ADAPTER_PATHS, BASE_PATH

BASE = "base"
"""Name of the base model where adapters are named."""
_MAX_NAMES = 10
"""Maximum number of names in an error message."""
DEMO: Final = "demo"
"""MODEL of the tiny model that the package contains, with its adapters."""
SERVER_URL = "http://127.0.0.1:8000"
Url = Annotated[
    str,
    typer.Option(
        help="Address of the server. Its key is read from LORAPLEX_API_KEY, or from the file of "
        "LORAPLEX_API_KEY_FILE."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the server's JSON.")]


def print_json(value: Any) -> None:
    """Print a value for programs, and for people who read JSON."""
    print(json.dumps(value, indent=2, ensure_ascii=False))


def print_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows in columns that are as wide as their widest cell."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    for row in (head, *rows):
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        print("  ".join(cells).rstrip())


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


def local_adapters(specs: list[str]) -> dict[str, str]:
    """Return the paths of --adapter NAME=PATH by name. Raises ConfigError."""
    adapters = {name: table["path"] for name, table in parse_adapters(specs).items()}
    if BASE in adapters:
        raise ConfigError("--adapter base=...: 'base' names the base model here")
    return adapters


def with_demo(model: str, adapters: dict[str, str]) -> tuple[str, dict[str, str]]:
    """Return MODEL and the paths of its adapters by name; for `demo` those in the package.

    A file or folder `demo` in the working folder is meant first. Given adapters take the place of
    shipped ones with their names.
    """
    if model != DEMO or os.path.lexists(model):
        return model, adapters
    return str(BASE_PATH), {name: str(path) for name, path in ADAPTER_PATHS.items()} | adapters


def near(name: str, names: Sequence[str]) -> str:
    """Return the rest of an error message: the names that a wrong name may be a typo of, or the
    first names that there are."""
    if found := difflib.get_close_matches(name, names, 3):
        return f"; did you mean {' or '.join(found)}?"
    more = ", ..." if len(names) > _MAX_NAMES else ""
    return f"; there are: {', '.join(names[:_MAX_NAMES]) or 'none'}{more}"


@contextlib.contextmanager
def errors_to_exit_code() -> Iterator[None]:
    """Turn a LoraplexError into one line on standard error and exit code 1, without a traceback."""
    try:
        yield
    except LoraplexError as error:
        print(f"loraplex: {error.message}", file=sys.stderr)
        raise typer.Exit(1) from error


MaxTokens = Annotated[int, typer.Option(help="Maximum number of new tokens.")]
Temperature = Annotated[float, typer.Option(help="Sampling temperature; 0: greedy.")]
TopP = Annotated[float, typer.Option(help="Nucleus sampling; 1: off.")]
TopK = Annotated[int, typer.Option(help="Number of likeliest tokens; 0: all.")]
MinP = Annotated[float, typer.Option(help="Minimum probability, relative to the likeliest token.")]
Seed = Annotated[int | None, typer.Option(help="Seed of the sampling.")]
Stop = Annotated[list[str] | None, typer.Option(help="Stop string; repeatable.")]
RepetitionPenalty = Annotated[
    float, typer.Option(help="Repetition penalty; above 1: less repetition.")
]
