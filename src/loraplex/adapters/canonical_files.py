"""Canonical adapter files in a state directory: find them, and delete those that are not needed.

A path is made from a digest only. Versions and names are not known here.
"""

import contextlib
import dataclasses
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from loraplex.adapters.canonical import canonical_path
from loraplex.adapters.state_lock import StateLock

_CANONICAL_NAME = re.compile(r"([0-9a-f]{64})\.safetensors")
_TEMPORARY_NAME = re.compile(r"\.[0-9a-f]{64}\.safetensors\.[0-9]+\.tmp")
_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclasses.dataclass(frozen=True, slots=True)
class Collected:
    """Result of a garbage collection."""

    num_files: int = 0
    num_bytes: int = 0
    is_refused: bool = False
    """Whether nothing was deleted because another process uses the files."""


class CanonicalFiles:
    """Access to the files, with a shared lock so that no other process deletes them."""

    def __init__(self, state_dir: Path) -> None:
        self._state_dir = state_dir
        self._share = StateLock.use_files(state_dir)

    def path(self, digest: str) -> str:
        assert _DIGEST.fullmatch(digest), digest
        return str(canonical_path(self._state_dir, digest))

    def has(self, digest: str) -> bool:
        return os.path.isfile(self.path(digest))

    def collect(self, may_go: Callable[[str], bool], min_age_seconds: float) -> Collected:
        """Delete the files whose digest may go, and incomplete files of killed writers.

        A file that was written within min_age_seconds stays: its version may be about to be
        registered. Deletes nothing while another process uses the files.
        """
        if not self._share.try_exclusive():
            self._share.share()
            return Collected(is_refused=True)
        try:
            return self._delete(may_go, time.time() - min_age_seconds)
        finally:
            self._share.share()

    def close(self) -> None:
        self._share.close()

    def _delete(self, may_go: Callable[[str], bool], newest: float) -> Collected:
        num_files = num_bytes = 0
        for entry in canonical_entries(self._state_dir):
            normal = _CANONICAL_NAME.fullmatch(entry.name)
            is_ours = may_go(normal[1]) if normal else _TEMPORARY_NAME.fullmatch(entry.name)
            # The staging worker may rename its files meanwhile.
            with contextlib.suppress(FileNotFoundError):
                status = entry.stat(follow_symlinks=False)
                if is_ours and status.st_mtime <= newest:
                    os.unlink(entry.path)
                    num_files += 1
                    num_bytes += status.st_size
        return Collected(num_files, num_bytes)


def canonical_entries(state_dir: Path) -> Iterator[os.DirEntry[str]]:
    """Yield each regular file of the folders of canonical files; links are not followed."""
    root = state_dir / "adapters"
    if not root.is_dir():
        return
    with os.scandir(root) as folders:
        for folder in folders:
            if folder.is_dir(follow_symlinks=False):
                # It may have been deleted since it was listed.
                with contextlib.suppress(FileNotFoundError), os.scandir(folder) as files:
                    yield from (f for f in files if f.is_file(follow_symlinks=False))
