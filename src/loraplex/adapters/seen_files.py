"""Notes of what files were found to be, so that they need not be read again.

A file is known by (device, inode, size, mtime_ns, ctime_ns). What else the finding depends on, such
as the base model, is the note's context. The notes are in a folder of the server, never next to the
user's file; a lost or broken note only means that the file is read again.
"""

import contextlib
import hashlib
from collections.abc import Sequence
from pathlib import Path

import msgspec

from loraplex.adapters.durable_files import write_atomically
from loraplex.core.errors import InvalidAdapterError

FileIdentity = tuple[int, int, int, int, int]

_NOTE_VERSION = 2


class _SeenNote(msgspec.Struct, frozen=True):
    version: int
    identities: tuple[FileIdentity, ...]
    context: str
    found: str = msgspec.field(name="digest")


def identities_of(paths: Sequence[Path]) -> tuple[FileIdentity, ...]:
    """Return the identity of each file. Raises InvalidAdapterError if one is gone."""
    try:
        found = [path.stat() for path in paths]
    except OSError as error:
        raise InvalidAdapterError(f"cannot read {error.filename}: {error.strerror}") from error
    return tuple(
        (one.st_dev, one.st_ino, one.st_size, one.st_mtime_ns, one.st_ctime_ns) for one in found
    )


class SeenFiles:
    """Notes in a state directory: one per set of files, named by a hash of their identities."""

    def __init__(self, state_dir: Path) -> None:
        self._folder = state_dir / "seen"

    def find(self, identities: tuple[FileIdentity, ...], context: str = "") -> str | None:
        """Return what these files were found to be in a context, such as a digest."""
        try:
            note = msgspec.json.decode(self._path(identities, context).read_bytes(), type=_SeenNote)
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
            return None
        key = (_NOTE_VERSION, identities, context)
        return note.found if (note.version, note.identities, note.context) == key else None

    def remember(self, identities: tuple[FileIdentity, ...], found: str, context: str = "") -> None:
        """Write a note, if that is possible: an adapter must not fail for it."""
        note = _SeenNote(_NOTE_VERSION, identities, context, found)
        with contextlib.suppress(OSError):
            write_atomically(self._path(identities, context), [msgspec.json.encode(note)])

    def _path(self, identities: tuple[FileIdentity, ...], context: str) -> Path:
        name = hashlib.sha256(msgspec.json.encode((identities, context))).hexdigest()
        return self._folder / name[:2] / f"{name}.json"
