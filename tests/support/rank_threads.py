"""All ranks of a model as threads of this process, which exchange through shared memory."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self, TypeVar

import msgspec
import torch

from loraplex.core.plan import Capacity, StepPlan, StepResult
from loraplex.execution.adapters.host_adapters import HostAdapter, HostAdapters
from loraplex.execution.adapters.layout import pieces_of
from loraplex.execution.loading import load_parts
from loraplex.execution.sizing.settings import RunnerSettings
from loraplex.execution.steps.model_runner import ModelRunner
from loraplex.kernels.channel import RankChannels
from loraplex.kernels.native.channel import Segment, SharedMemoryChannel
from loraplex.kernels.native.library import load_library
from loraplex.memory.adapter_pages import most_pages
from loraplex.models.linear_group import TensorShard
from support.reference_completions import RecordingSampler
from support.step_driver import StepDriver

_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True)
class Rank:
    host_adapters: HostAdapters
    runner: ModelRunner
    sampler: RecordingSampler
    channels: RankChannels

    def put(self, handle: int, adapter: HostAdapter) -> None:
        """Load an adapter, as the loaders of all ranks do together."""
        self.host_adapters[handle] = self.runner.prepare_adapter(adapter)


class RankThreads:
    """Implements engine.runner.Runner. Results are rank 0's; all ranks must have equal ones."""

    def __init__(self, folder: Path, settings: RunnerSettings, size: int) -> None:
        library = load_library()
        self._threads = [ThreadPoolExecutor(1) for _ in range(size)]
        segments = [Segment(library, size, slot_bytes=4096) for _ in range(2)]

        def load(rank: int) -> Rank:
            torch.set_num_threads(1)
            steps, loads = (SharedMemoryChannel(library, s.address, rank) for s in segments)
            channels, host = RankChannels(steps, loads), HostAdapters()
            try:
                parts = load_parts(
                    folder, settings, host, place=TensorShard(rank, size), channels=channels
                )
            except BaseException as error:
                steps.abort(f"rank {rank}: {error}")
                raise
            sampler = RecordingSampler(parts.capacity.vocab_size)
            runner = ModelRunner(dataclasses.replace(parts, sampler=sampler))
            return Rank(host, runner, sampler, channels)

        self.ranks: list[Rank] = []
        self.ranks = self.together(load)
        for segment in segments:
            segment.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def together(self, work: Callable[[int], _T]) -> list[_T]:
        """Return work(rank) of all ranks, each on its own thread. Raises the first error."""
        futures: Sequence[Future[_T]] = [
            thread.submit(work, rank) for rank, thread in enumerate(self._threads)
        ]
        return [future.result() for future in futures]

    def put(self, handle: int, adapter: HostAdapter) -> None:
        """Load an adapter on all ranks."""
        self.together(lambda rank: self.ranks[rank].put(handle, adapter))

    def capacity(self) -> Capacity:
        first, *others = (rank.runner.capacity() for rank in self.ranks)
        for other in others:
            # Shares of the output layer differ by one.
            replaced = msgspec.structs.replace(other, weights_bytes=first.weights_bytes)
            assert replaced == first
        return first

    def launch(self, plan: StepPlan) -> "_Done":
        first, *others = self.together(lambda rank: self.ranks[rank].runner.launch(plan).wait())
        for other in others:
            assert other.rows == first.rows
            assert other.copies_done == first.copies_done
        return _Done(first)

    def close(self) -> None:
        for rank in self.ranks:
            rank.runner.close()
            for channel in rank.channels:
                channel.close()
        for thread in self._threads:
            thread.shutdown()

    def pages_of(self, adapter: HostAdapter) -> int:
        """Return the number of pages that an adapter takes on each rank."""
        capacity = self.capacity()
        return most_pages(capacity.held(pieces_of(adapter)), capacity.page_geometry)


@dataclasses.dataclass(frozen=True)
class _Done:
    result: StepResult

    def wait(self) -> StepResult:
        return self.result


def rank_driver(
    folder: Path, adapters: Mapping[int, HostAdapter], size: int, **settings: Any
) -> tuple[StepDriver, RankThreads]:
    """Return a driver of the checkpoint on so many ranks, with all adapters on the device."""
    fixed = {"num_blocks": 160, "block_size": 8, "max_num_seqs": 16}
    ranks = RankThreads(folder, RunnerSettings(**(fixed | settings)), size)
    driver = StepDriver(ranks)
    for handle, adapter in adapters.items():
        ranks.put(handle, adapter)
        assert driver.load(handle, ranks.pages_of(adapter)).copies_done == (handle,)
    return driver, ranks
