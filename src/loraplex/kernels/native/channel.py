"""Channel of ranks on one machine: shared memory (native/include/loraplex/channel.h)."""

import ctypes
import fcntl
import os
import threading
import weakref
from types import TracebackType
from typing import Self

import msgspec
import torch

from loraplex.core.errors import DeviceLost, InternalError
from loraplex.kernels.native.library import Int, NativeLibrary, Pointer, Size

MAX_RANKS = 64
"""LORAPLEX_CHANNEL_MAX_RANKS"""

SLOT_BYTES = 1 << 20
"""Bytes that a rank publishes at once: 32 rows of 8192 float32. Longer data takes more rounds."""


class SegmentAddress(msgspec.Struct, frozen=True):
    """Where a rank finds a channel's shared memory, and how it is divided."""

    path: str
    """Path that each process of the same user on this machine can open."""
    size: int
    """Number of ranks."""
    slot_bytes: int


class Segment:
    """Shared memory of one channel. Ranks that have opened it keep it when it is closed."""

    def __init__(self, library: NativeLibrary, size: int, slot_bytes: int = SLOT_BYTES) -> None:
        """Raises InternalError if a size is wrong."""
        num_bytes = library.size_function("loraplex_channel_bytes", Size, Size)(size, slot_bytes)
        if num_bytes < 0:
            raise InternalError(
                f"a channel of {size} ranks with slots of {slot_bytes} bytes: there can be 1 to "
                f"{MAX_RANKS} ranks, and slots have a multiple of 64 bytes, at most 1 GiB"
            )
        fd = os.memfd_create("loraplex-channel", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self._close = weakref.finalize(self, os.close, fd)
        os.truncate(fd, num_bytes)
        # A process that changed the size would kill the others with SIGBUS.
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        self.address = SegmentAddress(f"/proc/{os.getpid()}/fd/{fd}", size, slot_bytes)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the file. Call it when all ranks have opened the segment."""
        self._close()


class SharedMemoryChannel:
    """Implements `Channel`. The calls of its library's ops that take its address use it, too."""

    def __init__(self, library: NativeLibrary, segment: SegmentAddress, rank: int) -> None:
        """Raises InternalError if the segment is missing or divided in another way."""
        self.rank = rank
        self.size = segment.size
        self._gather = library.function("loraplex_channel_gather", Pointer, Size, Pointer, Pointer)
        self._abort = library.function("loraplex_channel_abort", Pointer, ctypes.c_char_p)
        self._reason = library.text_function("loraplex_channel_abort_reason", Pointer)
        self._wait_ns = library.size_function("loraplex_channel_wait_ns", Pointer)
        self.address = _mapped(library, segment, rank)
        """The loraplex_channel that an op takes."""
        self._lock = threading.Lock()
        close = library.function("loraplex_channel_close", Pointer)
        self._close = weakref.finalize(self, close, self.address)
        self._close.atexit = False  # at the end of the process another thread may still wait in it

    @property
    def abort_reason(self) -> str:
        """The reason of the abort, on all ranks; empty if there was none."""
        with self._lock:
            return self._reason(self.address) if self._close.alive else ""

    @property
    def wait_seconds(self) -> float:
        """Time that this rank has waited for the others."""
        with self._lock:
            return self._wait_ns(self.address) / 1e9 if self._close.alive else 0.0

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        assert self._close.alive, "the channel is closed"
        assert tensor.is_contiguous(), "only contiguous tensors are gathered"
        assert tensor.device.type == "cpu", "shared memory takes tensors of the CPU"
        gathered = torch.empty((self.size, *tensor.shape), dtype=tensor.dtype)
        try:
            self._gather(self.address, tensor.nbytes, tensor.data_ptr(), gathered.data_ptr())
        except DeviceLost as error:
            raise DeviceLost(f"the ranks' exchange was aborted: {self.abort_reason}") from error
        return list(gathered)

    def abort(self, reason: str) -> None:
        with self._lock:
            if self._close.alive:
                self._abort(self.address, reason.encode())

    def close(self) -> None:
        with self._lock:
            self._close()


def _mapped(library: NativeLibrary, segment: SegmentAddress, rank: int) -> int:
    open_channel = library.pointer_function("loraplex_channel_open", Int, Size, Size, Size)
    try:
        fd = os.open(segment.path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise InternalError(f"cannot open a channel's shared memory: {error}") from error
    try:
        address = open_channel(fd, rank, segment.size, segment.slot_bytes)
        num_bytes = os.fstat(fd).st_size
    finally:
        os.close(fd)
    if address is None:
        raise InternalError(
            f"{segment.path} of {num_bytes} bytes cannot be the channel of rank {rank} among "
            f"{segment.size} with slots of {segment.slot_bytes} bytes"
        )
    return address
