"""Uploads: files of adapters that clients sent, until they are loaded or too old.

They lie in a folder of this process; the next process deletes it. A client names an upload as
upload://ID; the id is random, and only its tenant may use it. No text of a client becomes a path:
ids are looked up, and file names are those of the formats.
"""

import asyncio
import contextlib
import secrets
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO, Final, Self

import msgspec

from loraplex.adapters.durable_files import storage_full, storing
from loraplex.adapters.sources.fetch import FILE_NAMES, SINGLE_NAMES
from loraplex.core.byte_sizes import readable_bytes
from loraplex.core.clock import Clock
from loraplex.core.counts import counted
from loraplex.core.errors import (
    InvalidParameterError,
    PayloadTooLargeError,
    RateLimitedError,
    UploadNotFoundError,
)
from loraplex.core.private_folder import PrivateFolder

UPLOADS_ARE_OFF: Final = (
    "this server takes no uploads of adapters: the operator allows them with the setting uploads"
)
UPLOADED_NAMES: Final = (*FILE_NAMES, *SINGLE_NAMES)
"""Files that an upload may have."""
_SCHEME: Final = "upload://"
_ID_BYTES: Final = 16
_SPARE_BYTES: Final = 256 << 20
"""Free space that uploads leave on the disk: the names of adapters are stored there, too."""
_WRITE_BYTES: Final = 128 << 10
_NS: Final = 1_000_000_000


def is_upload(path: str) -> bool:
    """Whether the source of an adapter is an upload."""
    return path.startswith(_SCHEME)


class UploadLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of uploads."""

    max_bytes: int
    """Maximum size of one upload."""
    max_tenant_bytes: int
    """Maximum size of all uploads of a tenant together."""
    max_uploads: int
    """Maximum number of uploads of a tenant."""
    max_seconds: float
    """Lifetime after the last change."""


class UploadedFile(msgspec.Struct, frozen=True):
    name: str
    num_bytes: int


class UploadCard(msgspec.Struct, frozen=True, kw_only=True):
    """Upload as its tenant sees it."""

    id: str
    path: str
    """Source to load it from."""
    files: tuple[UploadedFile, ...]
    num_bytes: int
    max_bytes: int
    """Maximum size of all files together."""
    expires: int
    """Time at which it is removed unless it changes, in Unix seconds."""


class _Upload:
    def __init__(self, upload_id: str, tenant: str, folder: Path, now_ns: int) -> None:
        self.id = upload_id
        self.tenant = tenant
        self.folder = folder
        self.changed_ns = now_ns
        self.files: dict[str, int] = {}
        """Sizes of complete files by name."""
        self.incoming: set[IncomingFile] = set()

    @property
    def num_bytes(self) -> int:
        return sum(self.files.values()) + sum(file.num_bytes for file in self.incoming)


class Uploads:
    """All uploads of a server. All methods run on one event loop."""

    def __init__(self, parent: Path, limits: UploadLimits, clock: Clock) -> None:
        """Remove the uploads of servers that have ended. parent: their folder."""
        parent.mkdir(mode=0o700, exist_ok=True)
        self._folder = PrivateFolder(parent)
        self._limits = limits
        self._clock = clock
        self._uploads: dict[str, _Upload] = {}

    @property
    def max_bytes(self) -> int:
        """Return the maximum size of one upload."""
        return self._limits.max_bytes

    async def create(self, tenant: str) -> UploadCard:
        """Begin an upload. Raises RateLimitedError if the tenant has too many."""
        await self.remove_old()
        own = self._of(tenant)
        if len(own) >= self._limits.max_uploads:
            raise RateLimitedError(
                f"tenant {tenant!r} has {counted(len(own), 'upload')}, its maximum "
                "(max_uploads): load or delete one of them",
                retry_after_seconds=max(1.0, min(map(self._seconds_left, own))),
            )
        upload_id = secrets.token_hex(_ID_BYTES)
        folder = Path(self._folder.path) / upload_id
        with storing():
            folder.mkdir(mode=0o700)
        upload = _Upload(upload_id, tenant, folder, self._clock.now_ns())
        self._uploads[upload_id] = upload
        return self._card(upload)

    def describe(self, upload_id: str, tenant: str) -> UploadCard:
        """Raises UploadNotFoundError, also for uploads of other tenants."""
        return self._card(self._find(upload_id, tenant))

    def place(self, path: str, tenant: str) -> Path:
        """Return the folder or file of upload://ID, and let it live for its whole time again.

        Raises UploadNotFoundError.
        """
        upload = self._find(path.removeprefix(_SCHEME), tenant)
        upload.changed_ns = self._clock.now_ns()
        names = list(upload.files)
        is_single = len(names) == 1 and names[0] in SINGLE_NAMES
        return upload.folder / names[0] if is_single else upload.folder

    def begin_file(
        self, upload_id: str, tenant: str, name: str, num_bytes: int = 0
    ) -> "IncomingFile":
        """Begin to receive a file, which replaces one of the same name when it is complete.

        num_bytes: its size, if it is known. Raises UploadNotFoundError, InvalidParameterError for a
        name that no format has, PayloadTooLargeError, or StorageFullError.
        """
        upload = self._find(upload_id, tenant)
        if name not in UPLOADED_NAMES:
            raise InvalidParameterError(
                f"{name!r} is not a file of an adapter; supported: {', '.join(UPLOADED_NAMES)}",
                param="file",
            )
        self._check_size(upload, num_bytes)
        return IncomingFile(self, upload, name)

    async def delete(self, upload_id: str, tenant: str) -> None:
        """Remove an upload and its files. Raises UploadNotFoundError."""
        await self._remove([self._find(upload_id, tenant)])

    async def discard(self, path: str) -> None:
        """Remove an upload that was loaded, if it is still there."""
        upload = self._uploads.get(path.removeprefix(_SCHEME))
        if upload is not None:
            await self._remove([upload])

    async def remove_old(self) -> None:
        """Remove the uploads that have not changed for too long."""
        await self._remove([upload for upload in self._uploads.values() if self._is_old(upload)])

    def close(self) -> None:
        """Remove all files."""
        self._uploads.clear()
        self._folder.remove()

    def take(self, upload: _Upload, num_bytes: int) -> None:
        """Check that an upload may grow by so many bytes, and count that as a change."""
        self._find(upload.id, upload.tenant)
        self._check_size(upload, num_bytes)
        upload.changed_ns = self._clock.now_ns()

    async def _remove(self, uploads: Sequence[_Upload]) -> None:
        for upload in uploads:
            self._uploads.pop(upload.id, None)
        for upload in uploads:
            await asyncio.to_thread(shutil.rmtree, upload.folder, ignore_errors=True)

    def _find(self, upload_id: str, tenant: str) -> _Upload:
        upload = self._uploads.get(upload_id)
        if upload is None or upload.tenant != tenant or self._is_old(upload):
            raise UploadNotFoundError(
                f"there is no upload {upload_id[: 2 * _ID_BYTES]!r}: it was loaded or deleted, or "
                f"did not change for {self._limits.max_seconds:g} s; POST /v1/uploads begins one"
            )
        return upload

    def _of(self, tenant: str) -> list[_Upload]:
        return [upload for upload in self._uploads.values() if upload.tenant == tenant]

    def _is_old(self, upload: _Upload) -> bool:
        return not upload.incoming and self._seconds_left(upload) <= 0

    def _seconds_left(self, upload: _Upload) -> float:
        age_ns = self._clock.now_ns() - upload.changed_ns
        return self._limits.max_seconds - age_ns / _NS

    def _check_size(self, upload: _Upload, num_bytes: int) -> None:
        if upload.num_bytes + num_bytes > self._limits.max_bytes:
            raise PayloadTooLargeError(
                f"the upload would have {readable_bytes(upload.num_bytes + num_bytes)}; an adapter "
                f"may have {readable_bytes(self._limits.max_bytes)} (max_adapter_bytes)"
            )
        held = sum(each.num_bytes for each in self._of(upload.tenant))
        if held + num_bytes > self._limits.max_tenant_bytes:
            raise PayloadTooLargeError(
                f"the uploads of tenant {upload.tenant!r} would have "
                f"{readable_bytes(held + num_bytes)}; they may have "
                f"{readable_bytes(self._limits.max_tenant_bytes)} together (upload_bytes): load or "
                "delete one of them"
            )
        with storing():
            num_free = shutil.disk_usage(self._folder.path).free
        if num_free < num_bytes + _SPARE_BYTES:
            raise storage_full(f"less than {readable_bytes(num_bytes + _SPARE_BYTES)} are free")

    def _card(self, upload: _Upload) -> UploadCard:
        return UploadCard(
            id=upload.id,
            path=f"{_SCHEME}{upload.id}",
            files=tuple(UploadedFile(*item) for item in sorted(upload.files.items())),
            num_bytes=sum(upload.files.values()),
            max_bytes=self._limits.max_bytes,
            expires=int(time.time() + self._seconds_left(upload)),
        )


class IncomingFile:
    """File that arrives. It gets its name when it is complete, else the context deletes it."""

    def __init__(self, uploads: Uploads, upload: _Upload, name: str) -> None:
        self._uploads = uploads
        self._upload = upload
        self._name = name
        self._part = upload.folder / f".{secrets.token_hex(4)}.part"
        self._file: BinaryIO
        self._pieces: list[bytes] = []
        """Bytes that are not written yet."""
        self._num_waiting = 0
        self.num_bytes = 0
        """Bytes that have arrived."""

    def __enter__(self) -> Self:
        with storing():
            self._file = self._part.open("xb")
        self._upload.incoming.add(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._upload.incoming.discard(self)
        with contextlib.suppress(OSError):  # what a full disk left in the buffer
            self._file.close()
        with contextlib.suppress(OSError):  # the folder with it is removed later
            self._part.unlink(missing_ok=True)

    async def add(self, piece: bytes) -> None:
        """Write bytes. Raises PayloadTooLargeError, StorageFullError, or UploadNotFoundError for
        an upload that was removed meanwhile."""
        self._uploads.take(self._upload, len(piece))
        self.num_bytes += len(piece)
        self._pieces.append(piece)
        self._num_waiting += len(piece)
        if self._num_waiting >= _WRITE_BYTES:
            await self._write()

    async def finish(self) -> UploadCard:
        """Give the complete file its name. Raises as `add`."""
        await self._write()
        self._uploads.take(self._upload, 0)
        with storing():
            self._file.close()
            self._part.replace(self._upload.folder / self._name)
        self._upload.incoming.discard(self)
        self._upload.files[self._name] = self.num_bytes
        return self._uploads.describe(self._upload.id, self._upload.tenant)

    async def _write(self) -> None:
        """Write what waits, in a thread: the disk may be slow."""
        pieces, self._pieces, self._num_waiting = self._pieces, [], 0

        def write() -> None:
            with storing():
                self._file.writelines(pieces)

        await asyncio.to_thread(write)
