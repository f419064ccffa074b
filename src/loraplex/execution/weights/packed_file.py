"""The file of packed weights: a checked header, then tensors that are used where they lie.

8 bytes of magic, 8 of the header's length, 32 of its SHA-256, the header (JSON), zeros up to a
multiple of 64, and the tensors, each at a multiple of 64. All numbers are little-endian. A file is
written once, under another name, and never changed: processes that map it share its pages with
one another and with the system's cache.
"""

import contextlib
import hashlib
import mmap
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import msgspec
import torch

from loraplex.adapters.durable_files import make_folder, sync_folder
from loraplex.adapters.seen_files import FileIdentity
from loraplex.execution.weights.file_locks import use
from loraplex.kernels.ops import LinearParts

_MAGIC = b"LORAPLXW"
_HEAD_BYTES = len(_MAGIC) + 8 + 32
_MAX_HEADER_BYTES = 256 << 20
_ALIGNMENT = 64
PIECE_BYTES = 8 << 20
"""Large, and a multiple of a large page: see in_pieces."""
_SYNCED_BYTES = 64 << 20
_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "uint8": torch.uint8,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class PackedFileError(Exception):
    """The file is damaged or another one; the message contains the reason."""


class _Tensor(msgspec.Struct, frozen=True):
    dtype: str
    shape: tuple[int, ...]
    offset: int
    """Offset from the end of the header."""
    num_bytes: int


class _LayerEntry(msgspec.Struct, frozen=True):
    numbers: tuple[int, ...]
    tensors: tuple[_Tensor | None, ...]


class _Header(msgspec.Struct, frozen=True):
    key: str
    summary: str
    payload_bytes: int
    payload_digest: str
    """SHA-256 of all that follows the header."""
    entries: tuple[_LayerEntry, ...]


class PackedFile:
    """An open, mapped file whose header is right. The payload is not yet looked at."""

    def __init__(self, path: Path, key: str) -> None:
        """Raises OSError if it cannot be read, PackedFileError if it is no whole file of `key`."""
        self.path = path
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self._header, self._start = _read_header(descriptor, key)
            self.identity = _identity(descriptor)
            num_bytes, wanted = self.identity[2], self._start + self._header.payload_bytes
            if num_bytes != wanted:
                raise PackedFileError(f"it has {num_bytes} bytes and should have {wanted}")
            # The mapping has a copy of the descriptor, and so the lock for as long as it lives.
            use(descriptor)
            self._mapping = mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
            # What is not in the cache of files is then read in large pages, if the file system
            # has them (Linux 6.16 with ext4, and before it with xfs).
            with contextlib.suppress(AttributeError, OSError):
                self._mapping.madvise(mmap.MADV_HUGEPAGE)
        finally:
            os.close(descriptor)

    @property
    def summary(self) -> str:
        """What was said about the weights when they were packed."""
        return self._header.summary

    @property
    def payload_digest(self) -> str:
        """What the payload's SHA-256 must be."""
        return self._header.payload_digest

    def check_payload(self) -> None:
        """Read all of it. Raises PackedFileError if a bit of it is not as it was written."""
        with memoryview(self._mapping) as view, view[self._start :] as payload:
            if hashlib.sha256(payload).hexdigest() != self.payload_digest:
                raise PackedFileError("its content is damaged")

    def entries(self) -> Sequence[LinearParts]:
        """Tensors in the mapping, which lives as long as one of them."""
        return [
            LinearParts(entry.numbers, tuple(map(self._tensor, entry.tensors)))
            for entry in self._header.entries
        ]

    def _tensor(self, tensor: _Tensor | None) -> torch.Tensor | None:
        if tensor is None:
            return None
        dtype = _DTYPES[tensor.dtype]
        if not tensor.num_bytes:  # the embedding of a later stage; torch maps nothing of no size
            return torch.empty(tensor.shape, dtype=dtype)
        with warnings.catch_warnings():
            # Weights are only read.
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            flat = torch.frombuffer(
                self._mapping,
                dtype=dtype,
                count=tensor.num_bytes // dtype.itemsize,
                offset=self._start + tensor.offset,
            )
        return flat.view(tensor.shape)


def write_packed(
    path: Path,
    key: str,
    entries: Sequence[LinearParts],
    summary: str = "",
    pause: Callable[[], None] = lambda: None,
) -> None:
    """Write the file so that it is whole or not there. Raises OSError, and what `pause` raises.

    pause: called between pieces. Until the end the file has another name, no header, and a lock.
    """
    described, payload_bytes = _describe(entries)

    def head(payload_digest: str) -> bytes:
        header = msgspec.json.encode(
            _Header(key, summary, payload_bytes, payload_digest, described)
        )
        start = _MAGIC + len(header).to_bytes(8, "little") + hashlib.sha256(header).digest()
        return start + header + bytes(-len(start + header) % _ALIGNMENT)

    digest = hashlib.sha256()
    with _new_file(path) as file:
        start = len(head(digest.hexdigest()))
        file.seek(start)
        num_unsynced = 0
        for piece in in_pieces(_payload(entries), start):
            pause()
            digest.update(piece)
            file.write(piece)
            num_unsynced += len(piece)
            if num_unsynced >= _SYNCED_BYTES:
                # A long queue of dirty pages would stop every other program that writes.
                file.flush()
                os.fdatasync(file.fileno())
                num_unsynced = 0
        file.seek(0)
        file.write(head(digest.hexdigest()))


@contextlib.contextmanager
def _new_file(path: Path) -> Iterator[BinaryIO]:
    """Open a file that is durably at the path after the block, or nowhere if that raises.

    It is in use while it is open: what is not was left by a process that was killed.
    """
    make_folder(path.parent)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            use(file.fileno())
            yield file
            file.flush()
            os.fsync(file.fileno())
            temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def packed_bytes(entries: Sequence[LinearParts]) -> int:
    """How large a file of these is, but for its header."""
    return _describe(entries)[1]


def _describe(entries: Sequence[LinearParts]) -> tuple[tuple[_LayerEntry, ...], int]:
    """Where each tensor lies, and where the last one ends."""
    offset = 0
    described = []
    for entry in entries:
        tensors: list[_Tensor | None] = []
        for tensor in entry.tensors:
            if tensor is None:
                tensors.append(None)
                continue
            name, shape = _NAMES[tensor.dtype], tuple(tensor.shape)
            tensors.append(_Tensor(name, shape, offset, tensor.nbytes))
            offset += tensor.nbytes + -tensor.nbytes % _ALIGNMENT
        described.append(_LayerEntry(entry.numbers, tuple(tensors)))
    return tuple(described), offset


def _payload(entries: Sequence[LinearParts]) -> Iterator[memoryview | bytes]:
    for entry in entries:
        for tensor in entry.tensors:
            if tensor is not None:
                data = tensor.contiguous().flatten().view(torch.uint8).numpy().data
                yield data
                yield bytes(-tensor.nbytes % _ALIGNMENT)


def in_pieces(
    parts: Iterable[memoryview | bytes], start: int, num_bytes: int = PIECE_BYTES
) -> Iterator[bytearray]:
    """The same bytes, cut where a file in which they begin at `start` has multiples of `num_bytes`.

    File systems that know large pages give one to each part of a write that fills it.
    """
    piece, size = bytearray(), num_bytes - start % num_bytes
    for part in parts:
        taken = 0
        while taken < len(part):
            added = part[taken : taken + size - len(piece)]
            piece += added
            taken += len(added)
            if len(piece) == size:
                yield piece
                piece, size = bytearray(), num_bytes
    yield piece


def _read_header(descriptor: int, key: str) -> tuple[_Header, int]:
    """The header, and where the payload begins."""
    head = os.pread(descriptor, _HEAD_BYTES, 0)
    if len(head) != _HEAD_BYTES or not head.startswith(_MAGIC):
        raise PackedFileError("it is not a file of packed weights")
    length = int.from_bytes(head[8:16], "little")
    if length > _MAX_HEADER_BYTES:
        raise PackedFileError(f"its header claims {length} bytes")
    data = os.pread(descriptor, length, _HEAD_BYTES)
    if hashlib.sha256(data).digest() != head[16:]:
        raise PackedFileError("its header is damaged")
    try:
        header = msgspec.json.decode(data, type=_Header)
    except msgspec.MsgspecError as error:
        raise PackedFileError(f"its header is of another version: {error}") from error
    if header.key != key:
        raise PackedFileError("it holds other weights than its name claims")
    end = _HEAD_BYTES + length
    return header, end + -end % _ALIGNMENT


def _identity(descriptor: int) -> FileIdentity:
    """Return the identity that adapters.seen_files uses, of the open file itself."""
    status = os.fstat(descriptor)
    times = (status.st_mtime_ns, status.st_ctime_ns)
    return (status.st_dev, status.st_ino, status.st_size, *times)
