"""Regions of POSIX shared memory that clients on this machine register by name.

A tensor then lies in a region and not in the message. A region is read and written through its
file and never mapped: a client that makes its file shorter gets an error and cannot bring down
the server. Every tenant has its own names, and a key that one tenant has registered is refused to
the others. The first words of the errors are Triton's.

Keys are those of shm_open: a name in /dev/shm, with or without a slash before it.
"""

import dataclasses
import os
import stat
import threading
from pathlib import Path
from typing import NoReturn

import msgspec

from loraplex.core.errors import (
    InvalidRequestError,
    PermissionDeniedError,
    UnsupportedFeatureError,
)
from loraplex.core.principal import Principal
from loraplex.frontends.kserve.errors import AlreadyExistsError, NotFoundError

FOLDER = Path("/dev/shm")
MAX_REGIONS = 1024
"""Maximum number of regions per tenant."""
MAX_NAME_LENGTH = 255
MAX_REQUEST_BYTES = 2**31 - 1
"""That the inputs of one request may take from regions, all together."""
NO_CUDA = (
    "GPUs not supported: this server does not take tensors from the memory of a GPU; use system "
    "shared memory, or send them with the request"
)


@dataclasses.dataclass(frozen=True, slots=True)
class MemoryRegion:
    name: str
    key: str
    offset: int
    byte_size: int


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """Where in a region a tensor lies."""

    region: str
    offset: int
    byte_size: int


@dataclasses.dataclass(slots=True)
class _Open:
    region: MemoryRegion
    file: int
    """The descriptor of its file."""


class SharedMemory:
    """The regions of all tenants. Any thread may call it."""

    def __init__(self, folder: Path = FOLDER) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._regions: dict[str, dict[str, _Open]] = {}
        """Regions by tenant and name."""

    def register(self, tenant: str, name: str, key: str, offset: int, byte_size: int) -> None:
        """Raises AlreadyExistsError, InvalidRequestError, PermissionDeniedError."""
        _check_name(name)
        file_name = _file_name(key)
        with self._lock:
            own = self._regions.setdefault(tenant, {})
            if name in own:
                raise AlreadyExistsError(f"shared memory region '{name}' already in manager")
            if len(own) >= MAX_REGIONS:
                raise InvalidRequestError(
                    f"{MAX_REGIONS} shared memory regions are registered; unregister one first"
                )
            self._check_not_anothers(tenant, file_name, key)
            file = _opened(self._folder / file_name, key)
            try:
                _check_bounds(name, offset, byte_size, os.fstat(file).st_size)
            except BaseException:
                os.close(file)
                raise
            own[name] = _Open(MemoryRegion(name, key, offset, byte_size), file)

    def _check_not_anothers(self, tenant: str, file_name: str, key: str) -> None:
        for other, regions in self._regions.items():
            taken = {_file_name(held.region.key) for held in regions.values()}
            if other != tenant and file_name in taken:
                raise PermissionDeniedError(f"shared memory key '{key}' belongs to another tenant")

    def unregister(self, tenant: str, name: str = "") -> None:
        """One region, or without a name all of the tenant's. An unknown one is fine."""
        with self._lock:
            own = self._regions.get(tenant, {})
            for each in [name] if name else list(own):
                held = own.pop(each, None)
                if held is not None:
                    os.close(held.file)
            if not own:
                self._regions.pop(tenant, None)

    def status(self, tenant: str, name: str = "") -> list[MemoryRegion]:
        """Status of one region, or without a name of all the tenant's. Raises NotFoundError."""
        with self._lock:
            own = self._regions.get(tenant, {})
            if name and name not in own:
                raise NotFoundError(f"Unable to find system shared memory region: '{name}'")
            return [held.region for held in own.values() if name in ("", held.region.name)]

    def read(self, tenant: str, place: Place) -> bytes:
        """Raises NotFoundError, InvalidRequestError."""
        with self._lock:
            held = self._held(tenant, place)
            data = os.pread(held.file, place.byte_size, held.region.offset + place.offset)
        if len(data) != place.byte_size:
            raise _shrunk(place)
        return data

    def write(self, tenant: str, place: Place, data: bytes) -> None:
        """Data that is not longer than the place. Raises NotFoundError, InvalidRequestError."""
        with self._lock:
            held = self._held(tenant, place)
            start = held.region.offset + place.offset
            if os.fstat(held.file).st_size < start + len(data):
                raise _shrunk(place)
            os.pwrite(held.file, data, start)

    def check(self, tenant: str, place: Place) -> None:
        """That a place is in its region. Raises NotFoundError, InvalidRequestError."""
        with self._lock:
            self._held(tenant, place)

    def close(self) -> None:
        """Forget every region."""
        for tenant in list(self._regions):
            self.unregister(tenant)

    def _held(self, tenant: str, place: Place) -> _Open:
        held = self._regions.get(tenant, {}).get(place.region)
        if held is None:
            raise NotFoundError(f"Unable to find shared memory region: '{place.region}'")
        size = held.region.byte_size
        if place.offset > size:
            raise InvalidRequestError(
                f"Invalid offset for shared memory region: '{place.region}'; it has {size} bytes, "
                f"the offset is {place.offset}"
            )
        if place.offset + place.byte_size > size:
            raise InvalidRequestError(
                f"Invalid offset + byte size for shared memory region: '{place.region}'; it has "
                f"{size} bytes, {place.byte_size} are requested from {place.offset}"
            )
        return held


class TenantMemory(msgspec.Struct):
    """The regions as one request of a tenant sees them; what it may read is limited."""

    memory: SharedMemory
    tenant: str
    bytes_read: int = 0

    def read(self, place: Place) -> bytes:
        self.bytes_read += place.byte_size
        if self.bytes_read > MAX_REQUEST_BYTES:
            raise InvalidRequestError(
                f"the inputs in shared memory are larger than {MAX_REQUEST_BYTES} bytes together"
            )
        return self.memory.read(self.tenant, place)

    def check(self, place: Place) -> None:
        self.memory.check(self.tenant, place)

    def write(self, place: Place, data: bytes) -> None:
        self.memory.write(self.tenant, place, data)


def tenant_with_memory(principal: Principal) -> str:
    """Return the tenant of an operator: a region may be any file of /dev/shm that the server opens.

    Raises PermissionDeniedError.
    """
    principal.require_operator("use this machine's shared memory")
    return principal.tenant


def no_cuda_region(name: str) -> NoReturn:
    """Raise NotFoundError: no memory of a GPU is ever registered."""
    raise NotFoundError(f"Unable to find cuda shared memory region: '{name}'")


def refuse_cuda() -> NoReturn:
    """Raise UnsupportedFeatureError, for every registration of a GPU's memory."""
    raise UnsupportedFeatureError(NO_CUDA)


def _check_name(name: str) -> None:
    if not 0 < len(name) <= MAX_NAME_LENGTH or not name.isprintable():
        raise InvalidRequestError(
            f"{name[:40]!r} is not a name for a shared memory region; a name has 1 to "
            f"{MAX_NAME_LENGTH} printable characters",
            param="name",
        )


def _file_name(key: str) -> str:
    """The file's name in the folder. Raises InvalidRequestError for what is not just a name."""
    name = key.removeprefix("/")
    is_name = name.isprintable() and "/" not in name and name not in ("", ".", "..")
    if not is_name or len(name.encode(errors="replace")) > MAX_NAME_LENGTH:
        raise InvalidRequestError(
            f"Unable to open shared memory region: '{key[:300]}' is not a key; a key is a name of "
            f"1 to {MAX_NAME_LENGTH} bytes, with at most one slash, in front of it",
            param="key",
        )
    return name


def _opened(path: Path, key: str) -> int:
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        file = os.open(path, flags)
    except OSError as error:
        raise InvalidRequestError(
            f"Unable to open shared memory region: '{key}': {error.strerror}", param="key"
        ) from None
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise InvalidRequestError(
            f"Unable to open shared memory region: '{key}' is not a memory object", param="key"
        )
    return file


def _check_bounds(name: str, offset: int, byte_size: int, file_size: int) -> None:
    if offset < 0 or byte_size < 1 or offset + byte_size > file_size:
        raise InvalidRequestError(
            f"failed to register shared memory region '{name}': invalid args; offset {offset} and "
            f"byte_size {byte_size} must lie within the {file_size} bytes of its key",
            param="byte_size",
        )


def _shrunk(place: Place) -> InvalidRequestError:
    return InvalidRequestError(
        f"shared memory region '{place.region}' has become shorter than it was registered"
    )
