"""Places of shared declarations: a folder, or a prefix of an object store.

A place needs two promises: a listing shows every document that was written before it, and of
several writers of one document exactly one succeeds.
"""

import contextlib
import dataclasses
import os
import stat
import time
import uuid
from pathlib import Path
from typing import Protocol

from loraplex.adapters.declaration import MAX_DOCUMENT_BYTES, SUFFIX
from loraplex.adapters.durable_files import reporting_full_disk, sync_folder
from loraplex.adapters.sources.reference import OBJECT_SCHEMES
from loraplex.core.errors import SHORTAGES, ConfigError, LoraplexError, UnsupportedFeatureError

_SETTLED_NS = 2_000_000_000
"""Age from which a file's time shows every later change: some file systems round to 2 seconds."""


@dataclasses.dataclass(frozen=True, slots=True)
class Listed:
    """Document as a listing shows it."""

    tag: str
    """Tag that changes when the document does."""
    num_bytes: int
    problem: str = ""
    """Reason why it cannot be read; empty: it can."""


class DeclarationPlace(Protocol):
    """Documents by name. All methods block, and raise OSError where the place fails."""

    def documents(self) -> dict[str, Listed]:
        """Return all documents. A place without any may raise FileNotFoundError."""
        ...

    def read(self, name: str) -> bytes:
        """Return a document, cut after MAX_DOCUMENT_BYTES + 1 bytes."""
        ...

    def create(self, name: str, body: bytes) -> None:
        """Write a new document as a whole. Raises FileExistsError if there is one.

        Raises UnsupportedFeatureError if the place cannot keep two writers apart.
        """
        ...

    def delete(self, name: str) -> None: ...


class FolderPlace:
    """Folder on a local or a network file system."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def documents(self) -> dict[str, Listed]:
        found = {}
        now_ns = time.time_ns()
        root = self._folder.resolve(strict=True)
        with os.scandir(root) as entries:
            for entry in entries:
                if entry.name.startswith(".") or not entry.name.endswith(SUFFIX):
                    continue
                try:
                    if entry.is_symlink() and not _target(entry).is_relative_to(root):
                        continue
                    status = entry.stat()
                except FileNotFoundError:  # deleted meanwhile
                    continue
                except OSError as error:
                    if error.errno in SHORTAGES:
                        raise
                    problem = error.strerror or str(error)
                    found[entry.name] = Listed(problem, 0, problem)
                    continue
                if stat.S_ISREG(status.st_mode):
                    found[entry.name] = _listed(status, now_ns)
        return found

    def read(self, name: str) -> bytes:
        # Without O_NONBLOCK a pipe in place of the document would block this thread for ever.
        descriptor = os.open(self._folder / name, os.O_RDONLY | os.O_NONBLOCK)
        with open(descriptor, "rb") as file:
            return file.read(MAX_DOCUMENT_BYTES + 1)

    def create(self, name: str, body: bytes) -> None:
        # A link appears with the whole content, and fails if the name exists, also over NFS.
        arriving = self._folder / f".{uuid.uuid4().hex}.arriving"
        try:
            with reporting_full_disk(), arriving.open("xb") as file:
                file.write(body)
                file.flush()
                os.fsync(file.fileno())
            os.link(arriving, self._folder / name)
            sync_folder(self._folder)
        finally:
            arriving.unlink(missing_ok=True)

    def delete(self, name: str) -> None:
        (self._folder / name).unlink(missing_ok=True)


class ObjectPlace:
    """Prefix of an object store, through fsspec and the store's package."""

    def __init__(self, url: str) -> None:
        # A folder needs none of the packages for remote sources.
        from loraplex.adapters.sources import remotes  # noqa: PLC0415

        self._url = url
        self._files, self._path = remotes.object_store(url)
        self._tag = remotes.object_tag
        self._is_exclusive = False
        """Whether this process has seen the store refuse to replace an object."""

    def documents(self) -> dict[str, Listed]:
        self._files.invalidate_cache()
        return {
            name: Listed(self._tag(info), int(info.get("size") or 0))
            for info in self._files.ls(self._path, detail=True)
            if info.get("type") == "file"
            and (name := str(info["name"]).rpartition("/")[2]).endswith(SUFFIX)
            and not name.startswith(".")
        }

    def read(self, name: str) -> bytes:
        body: bytes = self._files.cat_file(f"{self._path}/{name}")
        return body

    def create(self, name: str, body: bytes) -> None:
        path = f"{self._path}/{name}"
        self._files.pipe_file(path, body, mode="create")
        if self._is_exclusive:
            return
        # An old client, or a store with a part of S3's protocol, replaces the object silently.
        try:
            self._files.pipe_file(path, body, mode="create")
        except FileExistsError:
            self._is_exclusive = True
            return
        self.delete(name)
        raise UnsupportedFeatureError(
            f"{self._url} does not refuse to replace an object (conditional writes), so two "
            "servers could declare one version: declare adapters by writing their documents",
        )

    def delete(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._files.rm_file(f"{self._path}/{name}")


def open_place(url: str) -> DeclarationPlace:
    """Open the place that a setting names: the path of a folder, or the URL of an object store.

    Raises ConfigError.
    """
    scheme, separator, rest = url.partition("://")
    if not separator:
        folder = Path(url).expanduser()
        if not folder.is_dir():
            raise ConfigError(f"adapter_declarations: there is no folder {folder}")
        return FolderPlace(folder.absolute())
    if scheme not in OBJECT_SCHEMES or not rest.strip("/"):
        known = ", ".join(f"{known}://" for known in OBJECT_SCHEMES)
        raise ConfigError(
            f"adapter_declarations must be a folder or the URL of an object store ({known}), "
            f"got {url}"
        )
    try:
        return ObjectPlace(url.rstrip("/"))
    except LoraplexError as error:
        raise ConfigError(f"adapter_declarations: {error.message}") from error


def _target(entry: os.DirEntry[str]) -> Path:
    return Path(os.path.realpath(entry.path, strict=True))


def _listed(status: os.stat_result, now_ns: int) -> Listed:
    tag = f"{status.st_ino} {status.st_size} {status.st_mtime_ns} {status.st_ctime_ns}"
    if now_ns - status.st_mtime_ns < _SETTLED_NS:
        tag += f" {now_ns}"  # read again: a second change may leave the same time
    return Listed(tag, status.st_size)
