"""How the ranks that share every layer exchange data: shared memory on a CPU, NCCL between GPUs."""

from typing import Final, Protocol

import msgspec
import torch

from loraplex.core.config import ModelConfig
from loraplex.core.errors import ConfigError
from loraplex.kernels.channel import RankChannels
from loraplex.kernels.cuda.channel import ChannelStore, connect_channels
from loraplex.kernels.native.channel import Segment, SegmentAddress, SharedMemoryChannel
from loraplex.kernels.native.library import NativeLibrary, NativeLibraryError, load_library
from loraplex.parallel.world import World

_NUM_CHANNELS: Final = 2
"""One for the steps, and one for the thread that loads adapters."""


class StageChannels(Protocol):
    """The channels of one rank to those that share its layers."""

    connected: RankChannels | None
    """None before `connect`."""

    def open(self) -> bytes:
        """Return the address of the rank that leads the stage; it is empty of the others."""
        ...

    def connect(self, address: bytes) -> None:
        """address: what `open` returned to the leader."""
        ...

    def wait_ns(self) -> int:
        """Time that the steps' thread waited for other ranks."""
        ...


class MemoryChannels:
    """Implements StageChannels by shared memory."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._segments: list[Segment] = []
        """Kept open, since others may open them later."""
        self._steps: SharedMemoryChannel | None = None
        self.connected: RankChannels | None = None

    def open(self) -> bytes:
        world = self._world
        if world.rank == world.stage_leader:
            sizes = [world.tensor_parallel_size] * _NUM_CHANNELS
            self._segments = [Segment(native_library(), size) for size in sizes]
        return msgspec.msgpack.encode([segment.address for segment in self._segments])

    def connect(self, address: bytes) -> None:
        rank = self._world.tensor_rank
        segments = msgspec.msgpack.decode(address, type=tuple[SegmentAddress, ...])
        self._steps, loads = (
            SharedMemoryChannel(native_library(), segment, rank) for segment in segments
        )
        self.connected = RankChannels(self._steps, loads)

    def wait_ns(self) -> int:
        return 0 if self._steps is None else int(self._steps.wait_seconds * 1e9)


class GpuChannels:
    """Implements StageChannels by NCCL. A rank waits for others in its GPU's queue of work."""

    def __init__(self, world: World, device: torch.device) -> None:
        """device: this rank's own."""
        self._world = world
        self._device = device
        self._store: ChannelStore | None = None
        self.connected: RankChannels | None = None

    def open(self) -> bytes:
        world = self._world
        if world.rank != world.stage_leader:
            return b""
        self._store = ChannelStore.listen()
        return self._store.address.encode()

    def connect(self, address: bytes) -> None:
        world = self._world
        if self._store is None:
            self._store = ChannelStore.reach(address.decode())
        self.connected = connect_channels(
            self._store, world.tensor_rank, world.tensor_parallel_size, self._device
        )

    def wait_ns(self) -> int:
        return 0


def stage_channels(model: ModelConfig, world: World) -> StageChannels:
    """Return what connects a rank with others. Raises ConfigError if there is no GPU for it."""
    if model.device.startswith("cuda"):
        return GpuChannels(
            world, torch.device(rank_device(model, world, torch.cuda.device_count()))
        )
    return MemoryChannels(world)


def rank_device(model: ModelConfig, world: World, num_gpus: int) -> str:
    """Return the device of a rank; on one machine each has a GPU of its own, from `device` on.

    num_gpus: those that this process sees; Ray shows an actor its own. Raises ConfigError if there
    are too few.
    """
    if world.size == 1 or model.executor == "ray" or not model.device.startswith("cuda"):
        return model.device
    first = torch.device(model.device).index or 0
    if first + world.size > num_gpus:
        raise ConfigError(
            f"{world.size} ranks need as many GPUs from {model.device} on, and this machine has "
            f"{num_gpus}: tensor_parallel_size times pipeline_parallel_size must be at most "
            f"{max(num_gpus - first, 1)}",
            param="tensor_parallel_size",
        )
    return f"cuda:{first + world.rank}"


def native_library() -> NativeLibrary:
    """Return the library of the native kernels. Raises ConfigError if there is none."""
    try:
        return load_library()
    except NativeLibraryError as error:
        raise ConfigError(f"ranks on a CPU need the native kernels: {error}") from error
