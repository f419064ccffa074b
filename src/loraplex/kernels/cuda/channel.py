"""Channels of ranks with a GPU each: torch.distributed copies between them, and never adds.

NCCL adds in an order of its own, which its algorithm, the message's size and the machine decide. So
every rank gets the shares of all, and adds them itself in one order.
"""

import datetime
import socket
import threading
import time
from typing import Any, Final, Self

import torch
from torch import distributed
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import (  # type: ignore[attr-defined]
    AllgatherOptions,
    AllToAllOptions,
)

from loraplex.core.errors import ConfigError, DeviceLost, InternalError
from loraplex.kernels.channel import RankChannels

HOST_SECONDS: Final = 30.0
"""Maximum time that one exchange through the hosts may take."""
_LOADS_SECONDS: Final = 600.0
"""And one of the loaders, which wait for the slowest disk."""
_START_SECONDS: Final = 300.0
"""Maximum time until all ranks have connected."""
_GPU_SECONDS: Final = 600.0
"""Time after which NCCL ends the process. The engine's own limit of a step is shorter."""
_POLL_SECONDS: Final = 0.0002
_MOST_POLL_SECONDS: Final = 0.01
_ABORT_CHECK_SECONDS: Final = 0.1
_ABORTED: Final = "aborted"
_STEPS, _LOADS = "steps", "loads"
_LOOPBACK: Final = "127.0.0.1"
"""Ranks that share layers are on one machine. Neither the store nor gloo authenticates."""


class ChannelStore:
    """Where the ranks of one engine meet. Rank 0 listens; it must live as long as the channels."""

    def __init__(self, store: TCPStore) -> None:
        self.store = store

    @classmethod
    def listen(cls) -> Self:
        """Listen on a free port of this machine, which no other machine can reach."""
        timeout = datetime.timedelta(seconds=_START_SECONDS)
        listener = socket.create_server((_LOOPBACK, 0))
        port = listener.getsockname()[1]
        return cls(
            TCPStore(
                *(_LOOPBACK, port, None, True, timeout),
                wait_for_workers=False,
                master_listen_fd=listener.detach(),
            )
        )

    @classmethod
    def reach(cls, address: str) -> Self:
        """Connect to rank 0's. Raises InternalError if there is none."""
        host, _, port = address.rpartition(":")
        timeout = datetime.timedelta(seconds=_START_SECONDS)
        try:
            return cls(TCPStore(host, int(port), None, False, timeout))
        except (ValueError, RuntimeError) as error:
            raise InternalError(f"no rank 0 is reached at {address!r}: {error}") from error

    @property
    def address(self) -> str:
        """HOST:PORT, for `reach`."""
        return f"{self.store.host}:{self.store.port}"


class DistributedChannel:
    """Implements `DeviceChannel`. It has its own group, so no other one of the process counts."""

    def __init__(
        self,
        store: ChannelStore,
        name: str,
        rank: int,
        size: int,
        device: torch.device,
        time_limit: float = HOST_SECONDS,
    ) -> None:
        """name: equal on all ranks, of this channel only. device: where data passes; on a GPU it is
        NCCL's. time_limit: seconds that one exchange through the hosts may take.
        """
        self.rank = rank
        self.size = size
        self._device = device
        self._time_limit = time_limit
        self._reasons = PrefixStore(name, store.store)
        self._aborted = threading.Event()
        self._reason = ""
        self._wait_seconds = 0.0
        meeting = PrefixStore(f"{name} group", store.store)
        self._group = _group(meeting, rank, size, device, time_limit)

    @property
    def abort_reason(self) -> str:
        """The reason of the abort, on all ranks; empty if there was none."""
        if not self._aborted.is_set() and self._reasons.check([_ABORTED]):
            self._note(self._reasons.get(_ABORTED).decode())
        return self._reason

    @property
    def wait_seconds(self) -> float:
        """Time that this rank's host has waited for the others; 0 on a GPU, where it does not."""
        return self._wait_seconds

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        assert tensor.is_contiguous(), "only contiguous tensors are gathered"
        if not tensor.numel():
            self.gathered(torch.zeros(1))  # a barrier
            return [tensor] * self.size
        return list(self.gathered(tensor.to(self._device)).to(tensor.device))

    def gathered(self, tensor: torch.Tensor) -> torch.Tensor:
        self._check()  # first: what is sent would end the others' waits
        tensor = tensor.to(self._device)
        result = tensor.new_empty((self.size, *tensor.shape))
        options = self._limited(AllgatherOptions())
        self._wait(self._group._allgather_base(result.flatten(), tensor.flatten(), options))
        return result

    def exchanged(self, parts: torch.Tensor) -> torch.Tensor:
        self._check()
        result = torch.empty_like(parts)
        options = self._limited(AllToAllOptions())
        self._wait(self._group.alltoall_base(result.flatten(), parts.flatten(), [], [], options))
        return result

    def abort(self, reason: str) -> None:
        if self._aborted.is_set():
            return
        self._note(reason)
        self._reasons.compare_set(_ABORTED, "", reason)
        if self._device.type == "cuda":
            self._group.abort()

    def close(self) -> None:
        """Leave the group. On a GPU nothing may be in its queue any more."""
        if self._device.type == "cuda" and not self._aborted.is_set():
            self._group.shutdown()

    def _limited(self, options: Any) -> Any:
        """Return an exchange's options with its time limit: the process's end waits for it."""
        seconds = _GPU_SECONDS if self._device.type == "cuda" else self._time_limit
        options.timeout = datetime.timedelta(seconds=seconds)
        return options

    def _note(self, reason: str) -> None:
        self._reason = self._reason or reason
        self._aborted.set()

    def _wait(self, work: distributed.Work) -> None:
        """Wait for an exchange through the hosts; one between GPUs only stands in the queue."""
        if self._device.type == "cuda":
            work.wait()  # makes the current stream wait, not the host
            return
        start = checked = time.monotonic()
        pause = 0.0
        while not work.is_completed():
            time.sleep(pause)
            pause = min(pause + _POLL_SECONDS, _MOST_POLL_SECONDS)
            now = time.monotonic()
            if now - checked > _ABORT_CHECK_SECONDS:
                checked = now
                self._check_others()
            if now - start > self._time_limit:
                raise DeviceLost(
                    f"rank {self.rank} waited {self._time_limit:g} seconds for the other ranks"
                )
        self._wait_seconds += time.monotonic() - start
        try:
            work.wait()
        except RuntimeError as error:
            raise DeviceLost(f"rank {self.rank} lost the other ranks: {error}") from error

    def _check(self) -> None:
        """Raise DeviceLost after an abort that this rank knows of."""
        if self._aborted.is_set():
            raise DeviceLost(f"the ranks' exchange was aborted: {self._reason}")

    def _check_others(self) -> None:
        """Raise DeviceLost after an abort of any rank, or if rank 0 is gone."""
        try:
            _ = self.abort_reason
        except RuntimeError as error:
            raise DeviceLost(f"rank {self.rank} lost rank 0: {error}") from error
        self._check()


def connect_channels(
    store: ChannelStore, rank: int, size: int, device: torch.device
) -> RankChannels:
    """Connect this rank with all others, which call this, too. device: that of its steps."""
    steps = DistributedChannel(store, _STEPS, rank, size, device)
    host = torch.device("cpu")
    return RankChannels(steps, DistributedChannel(store, _LOADS, rank, size, host, _LOADS_SECONDS))


def _group(store: Store, rank: int, size: int, device: torch.device, time_limit: float) -> Any:
    """Return one backend of torch.distributed, without its groups of the whole process."""
    if device.type == "cuda":
        nccl = getattr(distributed, "ProcessGroupNCCL", None)
        if nccl is None:
            raise ConfigError(
                "this torch was built without NCCL, which several GPUs need: "
                "tensor_parallel_size must be 1",
                param="tensor_parallel_size",
            )
        options = nccl.Options()
        options._timeout = datetime.timedelta(seconds=_GPU_SECONDS)
        return nccl(store, rank, size, options)
    options = distributed.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = datetime.timedelta(seconds=max(time_limit, _START_SECONDS))
    options._devices = [distributed.ProcessGroupGloo.create_device(hostname=_LOOPBACK)]
    return distributed.ProcessGroupGloo(store, rank, size, options)
