"""Notes of files that were staged before, so that staging them again is fast.

A file is known by (device, inode, size, mtime_ns, ctime_ns). Some formats mean something only with
a base model: its shapes are then the note's context. The notes are in the state directory, never
next to the user's file; a lost or broken note only means that the file is read again.
"""

import contextlib
import hashlib
from collections.abc import Sequence
from pathlib import Path

import msgspec

from loraplex.adapters.tensor_file import write_atomically
from loraplex.core.errors import InvalidAdapterError

FileIdentity = tuple[int, int, int, int, int]

_NOTE_VERSION = 2


class _SeenNote(msgspec.Struct, frozen=True):
    version: int
    identities: tuple[FileIdentity, ...]
    context: str
    digest: str


def identities_of(paths: Sequence[Path]) -> tuple[FileIdentity, ...]:
    """Return the identity of each file. Raises InvalidAdapterError if one is gone."""
    return tuple(_identity(path) for path in paths)


class SeenFiles:
    """Notes in a state directory: one per set of files, named by a hash of their identities."""

    def __init__(self, state_dir: Path) -> None:
        self._folder = state_dir / "seen"

    def digest(self, identities: tuple[FileIdentity, ...], *contexts: str) -> str | None:
        """Return the digest of the adapter in these files, if it is known in one of the contexts.

        Without a context: in the empty one.
        """
        for context in contexts or ("",):
            try:
                note = msgspec.json.decode(
                    self._path(identities, context).read_bytes(), type=_SeenNote
                )
            except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
                continue
            if (note.version, note.identities, note.context) == (
                _NOTE_VERSION,
                identities,
                context,
            ):
                return note.digest
        return None

    def remember(
        self, identities: tuple[FileIdentity, ...], digest: str, context: str = ""
    ) -> None:
        """Write a note, if that is possible: an adapter must not fail for it."""
        note = _SeenNote(_NOTE_VERSION, identities, context, digest)
        with contextlib.suppress(OSError):
            write_atomically(self._path(identities, context), [msgspec.json.encode(note)])

    def _path(self, identities: tuple[FileIdentity, ...], context: str) -> Path:
        name = hashlib.sha256(msgspec.json.encode((identities, context))).hexdigest()
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
