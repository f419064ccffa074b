"""Ranks of a model as processes of this machine, which share a channel."""

import multiprocessing
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Self

from loraplex.kernels.native.channel import SLOT_BYTES, Segment, SharedMemoryChannel
from loraplex.kernels.native.library import NativeLibrary

RankBody = Callable[[SharedMemoryChannel], Any]
"""Code of one rank; its result must be picklable."""


class RankFailed(AssertionError):
    """A rank raised an exception, or ended without a result."""


class RankProcesses:
    """Forked processes, so a body may be any closure."""

    def __init__(
        self, library: NativeLibrary, size: int, body: RankBody, slot_bytes: int = SLOT_BYTES
    ) -> None:
        context = multiprocessing.get_context("fork")
        self.segment = Segment(library, size, slot_bytes)
        self.channel = SharedMemoryChannel(library, self.segment.address, 0)
        """Used to abort only: rank 0 is another process."""
        self._results: list[Connection] = []
        self.processes = []
        for rank in range(size):
            result, send = context.Pipe(duplex=False)
            arguments = (library, self.segment, rank, body, send)
            process = context.Process(target=_run, args=arguments, daemon=True)
            process.start()
            send.close()
            self._results.append(result)
            self.processes.append(process)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for process, result in zip(self.processes, self._results, strict=True):
            process.kill()
            process.join()
            result.close()
        self.channel.close()
        self.segment.close()

    def result(self, rank: int) -> Any:
        """Return what the body of a rank returned. Raises RankFailed."""
        try:
            result, error = self._results[rank].recv()
        except EOFError:
            raise RankFailed(f"rank {rank} ended without a result") from None
        if error is not None:
            raise RankFailed(f"rank {rank}: {error}")
        return result

    def results(self) -> list[Any]:
        return [self.result(rank) for rank in range(len(self.processes))]


def run_ranks(
    library: NativeLibrary, size: int, body: RankBody, slot_bytes: int = SLOT_BYTES
) -> list[Any]:
    """Return what the body returned on each rank. Raises RankFailed."""
    with RankProcesses(library, size, body, slot_bytes) as ranks:
        return ranks.results()


def _run(
    library: NativeLibrary, segment: Segment, rank: int, body: RankBody, send: Connection
) -> None:
    channel = SharedMemoryChannel(library, segment.address, rank)
    try:
        send.send((body(channel), None))
    except BaseException as error:
        channel.abort(f"rank {rank}: {error}")
        send.send((None, traceback.format_exc()))
