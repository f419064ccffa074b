"""Which adapter a file was, when it was staged before: so that staging it again is fast.

A file is known by (device, inode, size, mtime_ns, ctime_ns). The notes are in the state directory,
never beside the user's file; a lost or broken note costs one more reading.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path

import msgspec

from loraplex.adapters.tensor_file import write_atomically
from loraplex.core.errors import InvalidAdapterError

FileIdentity = tuple[int, int, int, int, int]

_NOTE_VERSION = 1


class _Note(msgspec.Struct, frozen=True):
    version: int
    identities: tuple[FileIdentity, ...]
    digest: str


def identities_of(paths: Sequence[Path]) -> tuple[FileIdentity, ...]:
    """Raises InvalidAdapterError if a file is gone."""
    return tuple(_identity(path) for path in paths)


class SeenFiles:
    """One note per set of files, named by a hash of their identities."""

    def __init__(self, state_dir: Path) -> None:
        self._folder = state_dir / "seen"

    def digest(self, identities: tuple[FileIdentity, ...]) -> str | None:
        """The digest of the adapter in these very files, if it is known."""
        try:
            note = msgspec.json.decode(self._path(identities).read_bytes(), type=_Note)
        except (OSError, msgspec.MsgspecError):
            return None
        if note.version != _NOTE_VERSION or note.identities != identities:
            return None
        return note.digest

    def remember(self, identities: tuple[FileIdentity, ...], digest: str) -> None:
        note = _Note(_NOTE_VERSION, identities, digest)
        write_atomically(self._path(identities), [msgspec.json.encode(note)])

    def _path(self, identities: tuple[FileIdentity, ...]) -> Path:
        name = hashlib.sha256(msgspec.json.encode(identities)).hexdigest()
        return self._folder / name[:2] / f"{name}.json"


def _identity(path: Path) -> FileIdentity:
    try:
        status = path.stat()
    except OSError as error:
        raise InvalidAdapterError(f"cannot read {path}: {error.strerror}") from error
    return (
        status.st_dev,
        status.st_ino,
        status.st_size,
        status.st_mtime_ns,
        status.st_ctime_ns,
    )
