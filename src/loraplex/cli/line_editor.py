"""Lines that a user types: editing, history and completion by Python's readline."""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

from loraplex.core.environment import state_directory

_MAX_LINES: Final = 1000
"""Maximum number of lines in the file of the history."""


def history_file() -> Path:
    return state_directory("") / "chat_history"


@contextlib.contextmanager
def line_editing(
    completions: Callable[[str], Sequence[str]], history: Path | None
) -> Iterator[None]:
    """Complete words, and keep the lines in a file that only the user may read; None: keep none.

    completions: returns the words that the last word of a line may become.
    """
    try:
        import readline  # noqa: PLC0415
    except ImportError:  # a Python built without it: lines are read as the terminal gives them
        yield
        return
    found: list[str] = []

    def complete(_: str, index: int) -> str | None:
        if index == 0:
            found[:] = completions(readline.get_line_buffer()[: readline.get_endidx()])
        return found[index] if index < len(found) else None

    readline.set_completer(complete)
    readline.set_completer_delims(" ")
    readline.parse_and_bind("tab: complete")
    kept = history if history is not None and _is_writable(history) else None
    if kept is not None:
        readline.read_history_file(kept)
        readline.set_history_length(_MAX_LINES)
    try:
        yield
    finally:
        readline.set_completer(None)
        if kept is not None:
            readline.write_history_file(kept)


def _is_writable(history: Path) -> bool:
    """Create the file if it is missing; return whether the history can be kept there."""
    try:
        history.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(history, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.fchmod(descriptor, 0o600)
        finally:
            os.close(descriptor)
    except OSError as error:
        print(f"The history is not kept: {history}: {error.strerror}", file=sys.stderr)
        return False
    return True
