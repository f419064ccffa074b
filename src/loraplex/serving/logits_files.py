"""Logits on their way out of an engine: each file is read once and deleted, or deleted unread."""

import contextlib
import itertools
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import msgspec

from loraplex.core.errors import EngineRestartedError
from loraplex.core.output import EngineOutput, Logits, LogitsFile
from loraplex.core.private_folder import PrivateFolder


def files_of(outputs: Iterable[EngineOutput]) -> Iterator[LogitsFile]:
    for output in outputs:
        yield from output.prompt_logits
        yield from itertools.chain.from_iterable(delta.logits for delta in output.deltas)


class LogitsFolder:
    """Files of delivered outputs until they are read: an engine's own folder ends with it."""

    def __init__(self) -> None:
        self._folder: PrivateFolder | None = None
        self._names = itertools.count()

    def keep(self, output: EngineOutput) -> EngineOutput:
        """Move the files of an output here; return the output with their new paths."""
        if not output.prompt_logits and not any(delta.logits for delta in output.deltas):
            return output
        deltas = (
            msgspec.structs.replace(delta, logits=self._moved(delta.logits))
            for delta in output.deltas
        )
        prompt_logits = self._moved(output.prompt_logits)
        return msgspec.structs.replace(output, deltas=tuple(deltas), prompt_logits=prompt_logits)

    def close(self) -> None:
        """Delete what was not read."""
        if self._folder is not None:
            self._folder.remove()

    def _moved(self, files: tuple[LogitsFile, ...]) -> tuple[LogitsFile, ...]:
        return tuple(LogitsFile(self._move(file.path), file.num_rows) for file in files)

    def _move(self, path: str) -> str:
        # Next to the engine's folder, so that a file is renamed and not copied.
        self._folder = self._folder or PrivateFolder()
        kept = os.path.join(self._folder.path, str(next(self._names)))
        try:
            os.rename(path, kept)
        except OSError:  # the reader reports it
            return path
        return kept


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
