"""Files of a journal: PATH is the newest part, followed by the older ones PATH.1, PATH.2, ...

Each entry is one write to the operating system, so the entries of a dead engine are complete. Only
the last line may be torn.
"""

import fcntl
import logging
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

import msgspec

from loraplex.core.errors import ConfigError
from loraplex.engine.journal import (
    JOURNAL_VERSION,
    JournalEntry,
    JournalHeader,
    encodable,
)

NUM_PARTS = 8
"""Number of parts that share a journal's bytes."""

logger = logging.getLogger(__name__)


class JournalFile:
    """Journal in files. A full disk ends the journal, not the engine."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        """max_bytes: limit of all parts together; the oldest part is deleted."""
        self._path = path
        self._max_part_bytes = max(1, max_bytes // NUM_PARTS)
        self._encoder = msgspec.json.Encoder()
        self._header: JournalHeader | None = None
        self._descriptor: int | None = None
        self._num_bytes = 0

    def begin(self, header: JournalHeader) -> None:
        """Raises ConfigError if the file cannot be written, or another engine writes it."""
        self._header = msgspec.structs.replace(header, run=uuid.uuid4().hex, part=0)
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._refuse_second_writer()
            self._begin_part()
        except OSError as error:
            raise ConfigError(
                f"cannot write iteration_log {self._path}: {error.strerror}"
            ) from error
        logger.warning(
            "iteration_log: %s contains the tokens of every prompt and output; protect it as you "
            "protect them",
            self._path,
        )

    def write(self, entry: JournalEntry) -> None:
        if self._descriptor is None:
            return
        line = self._encoder.encode(encodable(entry)) + b"\n"
        try:
            if self._num_bytes + len(line) > self._max_part_bytes:
                self._next_part()
            self._append(line)
        except OSError as error:
            logger.error("iteration_log: %s ends here: %s", self._path, error.strerror)
            self.close()

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _append(self, line: bytes) -> None:
        assert self._descriptor is not None, "the journal has not begun"
        self._num_bytes += len(line)
        while line:
            line = line[os.write(self._descriptor, line) :]

    def _next_part(self) -> None:
        assert self._header is not None, "the journal has not begun"
        self._header = msgspec.structs.replace(self._header, part=self._header.part + 1)
        self.close()
        self._begin_part()

    def _begin_part(self) -> None:
        for number in range(NUM_PARTS - 1, 0, -1):
            older = part_path(self._path, number - 1)
            if older.exists():
                older.replace(part_path(self._path, number))
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        self._descriptor = os.open(self._path, flags, 0o600)
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        self._num_bytes = 0
        self._append(self._encoder.encode(self._header) + b"\n")

    def _refuse_second_writer(self) -> None:
        try:
            descriptor = os.open(self._path, os.O_WRONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"iteration_log {self._path} is written by another engine: give each model a file "
                "of its own, under [models.NAME]"
            ) from None
        finally:
            os.close(descriptor)


class JournalLine(NamedTuple):
    path: Path
    number: int
    """Line number, starting at 1."""
    num_bytes: int
    entry: JournalEntry


class JournalError(Exception):
    """Error of a file that is no journal, or an incomplete one."""


class JournalReader:
    """Iterator over the entries of a journal from its first part on, without further headers.

    Raises JournalError, with file and line, for a file that is no iteration log, and for a journal
    whose beginning is missing.
    """

    def __init__(self, path: Path) -> None:
        self._decoder: msgspec.json.Decoder[JournalEntry] = msgspec.json.Decoder(JournalEntry)
        self._parts = self._find_parts(path)
        self.header = self._header_of(self._parts[0])
        self.num_bytes = sum(part.stat().st_size for part in self._parts)
        self.is_torn = False
        """Whether the last line was cut off; it is left out."""

    def __iter__(self) -> Iterator[JournalLine]:
        for index, part in enumerate(self._parts):
            is_last = index == len(self._parts) - 1
            with _opened(part) as file:
                for number, line in enumerate(file, start=1):
                    if is_last and not line.endswith(b"\n"):
                        self.is_torn = True
                    elif number > 1:
                        entry = self._entry(part, number, line)
                        yield JournalLine(part, number, len(line), entry)

    def _find_parts(self, path: Path) -> list[Path]:
        newest = self._header_of(path)
        parts = [path]
        stem, first_number = _stem_and_number(path)
        for part in range(newest.part - 1, -1, -1):
            older = part_path(stem, first_number + newest.part - part)
            if not older.exists() or self._header_of(older).run != newest.run:
                raise JournalError(
                    f"{path} is part {newest.part + 1} of its journal, and part {part + 1} "
                    f"({older}) is not there: a journal is replayed from its beginning"
                )
            parts.append(older)
        return parts[::-1]

    def _header_of(self, part: Path) -> JournalHeader:
        with _opened(part) as file:
            line = file.readline()
        version = _version_of(line)
        if version not in (None, JOURNAL_VERSION):
            raise JournalError(
                f"{part} is a journal of version {version}; this loraplex reads version "
                f"{JOURNAL_VERSION}"
            )
        entry = self._entry(part, 1, line)
        if not isinstance(entry, JournalHeader):
            raise JournalError(f"{part}, line 1: a journal begins with its header")
        return entry

    def _entry(self, part: Path, number: int, line: bytes) -> JournalEntry:
        try:
            return self._decoder.decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError, ConfigError) as error:
            raise JournalError(
                f"{part}, line {number}: not of an iteration log: {error}"
            ) from error


class _Version(msgspec.Struct, tag="header"):
    """The one field of a JournalHeader that every version has."""

    version: int


def _version_of(line: bytes) -> int | None:
    """Return the version of a header whose other fields may have changed; None: no header."""
    try:
        return msgspec.json.decode(line, type=_Version).version
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None


def _opened(part: Path) -> BinaryIO:
    try:
        return part.open("rb")
    except OSError as error:
        raise JournalError(f"cannot read {part}: {error.strerror}") from error


def part_path(path: Path, number: int) -> Path:
    """Return the path of a part; the newest one is number 0."""
    return path.with_name(f"{path.name}.{number}") if number else path


def _stem_and_number(path: Path) -> tuple[Path, int]:
    """Split off a part number: `log.jsonl.3` may be the newest part of a former journal."""
    if path.suffix[1:].isdecimal():
        return path.with_suffix(""), int(path.suffix[1:])
    return path, 0
