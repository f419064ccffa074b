"""Logits on their way out of an engine: each file is read once and deleted, or deleted unread."""

import contextlib
import itertools
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from loraplex.core.errors import EngineRestartedError
from loraplex.core.output import EngineOutput, Logits, LogitsFile


def files_of(outputs: Iterable[EngineOutput]) -> Iterator[LogitsFile]:
    for output in outputs:
        yield from output.prompt_logits
        yield from itertools.chain.from_iterable(delta.logits for delta in output.deltas)


def read_and_delete(files: Iterable[LogitsFile]) -> Mapping[str, Logits]:
    """What the files hold, by path. Raises EngineRestartedError; even then no file is left."""
    logits: dict[str, Logits] = {}
    unread: list[LogitsFile] = []
    for file in files:
        try:
            logits[file.path] = Logits(Path(file.path).read_bytes(), file.num_rows)
        except OSError:
            unread.append(file)
        _delete(file)
    if unread:
        raise EngineRestartedError(
            "the engine stopped, and with it went logits of this request: please send it once more",
            retry_after_seconds=1,
        )
    return logits


def discard(outputs: Iterable[EngineOutput]) -> None:
    """Delete the files of outputs that are not read."""
    for file in files_of(outputs):
        _delete(file)


def first_rows(pieces: Iterable[Logits], num_rows: int) -> tuple[Logits, ...]:
    """The first rows of pieces that follow each other."""
    kept: list[Logits] = []
    for piece in pieces:
        if num_rows <= 0:
            break
        if piece.num_rows > num_rows:
            row_bytes = len(piece.data) // piece.num_rows
            piece = Logits(piece.data[: num_rows * row_bytes], num_rows)
        kept.append(piece)
        num_rows -= piece.num_rows
    return tuple(kept)


def _delete(file: LogitsFile) -> None:
    with contextlib.suppress(OSError):
        os.unlink(file.path)
