"""Ranks of an interpreted GPU: threads that take turns, since Triton's interpreter runs one."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest
import torch

from loraplex.core.errors import DeviceLost

UNINITIALISED = tuple(
    pytest.mark.filterwarnings(f"ignore:{what} encountered in add:RuntimeWarning")
    for what in ("overflow", "invalid value")
)
"""Marks of tests with LoRA: x A^T is added at places, too, that no program writes or reads."""

_T = TypeVar("_T")
_SECONDS = 600.0
"""Maximum time that a rank waits for the others: they compute by turns."""


class _Meeting:
    def __init__(self, size: int) -> None:
        self.size = size
        self.turn = threading.Lock()
        self.barrier = threading.Barrier(size)
        self.tensors: list[torch.Tensor] = [torch.empty(0)] * size


class TurnsChannel:
    """Implements kernels.channel.DeviceChannel. A rank has the turn until it waits for others."""

    def __init__(self, meeting: _Meeting, rank: int) -> None:
        self._meeting = meeting
        self.rank = rank
        self.size = meeting.size
        self.num_exchanges = 0
        self.num_bytes = 0
        """Bytes that this rank has sent."""

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        return list(self.gathered(tensor))

    def gathered(self, tensor: torch.Tensor) -> torch.Tensor:
        self.num_bytes += tensor.nbytes * (self.size - 1)
        return torch.stack(self._tensors(tensor))

    def exchanged(self, parts: torch.Tensor) -> torch.Tensor:
        assert parts.shape[0] == self.size
        self.num_bytes += parts.nbytes * (self.size - 1) // self.size
        return torch.stack([of_rank[self.rank] for of_rank in self._tensors(parts)])

    def abort(self, reason: str) -> None:
        self._meeting.barrier.abort()

    def close(self) -> None:
        pass

    def _tensors(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensors of all ranks, which must have one shape and dtype."""
        assert tensor.is_contiguous()
        meeting = self._meeting
        self.num_exchanges += 1
        meeting.tensors[self.rank] = tensor
        meeting.turn.release()
        try:
            meeting.barrier.wait(_SECONDS)
            found = [given.clone() for given in meeting.tensors]
            meeting.barrier.wait(_SECONDS)
        except threading.BrokenBarrierError as error:
            raise DeviceLost("another rank failed, or did not come") from error
        finally:
            meeting.turn.acquire()
        assert {(given.shape, given.dtype) for given in found} == {(tensor.shape, tensor.dtype)}
        return found


def ranks_in_turns(size: int, body: Callable[[TurnsChannel], _T]) -> list[_T]:
    """Return body(channel) of each rank. Raises the first rank's error."""
    meeting = _Meeting(size)

    def run(rank: int) -> _T:
        with meeting.turn:
            try:
                return body(TurnsChannel(meeting, rank))
            except BaseException:
                meeting.barrier.abort()
                raise

    with ThreadPoolExecutor(size) as threads:
        futures = [threads.submit(run, rank) for rank in range(size)]
    errors = [error for future in futures if (error := future.exception()) is not None]
    for error in errors:
        if not isinstance(error, DeviceLost):
            raise error
    if errors:
        raise errors[0]
    return [future.result() for future in futures]
