"""Ranks agree about adapters and sizes, or none of them has what one lacks."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from loraplex.core.errors import AdapterLoadError, ConfigError, InvalidAdapterError
from loraplex.core.plan import KVGroupCapacity, PageGeometry
from loraplex.execution.adapters.agreement import agreed
from loraplex.execution.sizing.agreement import agreed_size
from loraplex.execution.sizing.capacity import AdapterPoolSize, MemorySize
from loraplex.execution.sizing.kv import KVSize
from loraplex.kernels.native.channel import Segment, SharedMemoryChannel
from loraplex.kernels.native.library import load_library


def on_ranks(size: int, work: Any) -> list[Any]:
    """Return what work(rank, channel) gives on each rank: a result or an exception."""
    library = load_library()
    with Segment(library, size) as segment, ThreadPoolExecutor(size) as threads:
        channels = [SharedMemoryChannel(library, segment.address, rank) for rank in range(size)]

        def attempt(rank: int) -> Any:
            try:
                return work(rank, channels[rank])
            except Exception as error:
                return error

        results = list(threads.map(attempt, range(size)))
        for channel in channels:
            channel.close()
        return results


def test_all_have_it() -> None:
    assert on_ranks(3, lambda rank, channel: agreed(channel, lambda: rank * 10)) == [0, 10, 20]


def test_what_fails_on_one_rank_is_refused_on_all() -> None:
    def work(rank: int, channel: SharedMemoryChannel) -> int:
        def attempt() -> int:
            if rank == 1:
                raise InvalidAdapterError("the file is of another adapter: ü")
            return rank

        with pytest.raises((InvalidAdapterError, AdapterLoadError)) as raised:
            agreed(channel, attempt)
        # The next adapter is not touched by it.
        assert agreed(channel, lambda: rank) == rank
        raise raised.value

    first, second, third = on_ranks(3, work)
    assert isinstance(second, InvalidAdapterError)
    for other in (first, third):
        assert isinstance(other, AdapterLoadError)
        assert other.message == "rank 1 of 3: the file is of another adapter: ü"


def test_a_long_message_is_cut() -> None:
    def work(rank: int, channel: SharedMemoryChannel) -> None:
        def attempt() -> None:
            if rank == 0:
                raise AdapterLoadError("x" * 100_000)

        agreed(channel, attempt)

    _, other = on_ranks(2, work)
    assert 1000 < len(other.message) < 3000


def size_of(num_blocks: int, num_pages: int, max_model_len: int = 64) -> MemorySize:
    capacities = (
        KVGroupCapacity(num_blocks=num_blocks, num_host_blocks=num_pages),
        KVGroupCapacity(num_blocks=9),
    )
    pool = AdapterPoolSize(PageGeometry(16, 4), num_pages, 64, 16)
    return MemorySize(KVSize(max_model_len, (), capacities, 1000), pool)


def test_the_smallest_of_each_size_counts() -> None:
    sizes = [size_of(10, 7), size_of(12, 5)]
    found = on_ranks(2, lambda rank, channel: agreed_size(sizes[rank], channel))
    for size in found:
        assert [group.num_blocks for group in size.kv.capacities] == [10, 9]
        assert [group.num_host_blocks for group in size.kv.capacities] == [5, 0]
        assert size.adapters.num_pages == 5


def test_ranks_with_sequences_of_different_lengths_do_not_start() -> None:
    sizes = [size_of(10, 7, 64), size_of(10, 7, 32)]
    for error in on_ranks(2, lambda rank, channel: agreed_size(sizes[rank], channel)):
        assert isinstance(error, ConfigError)
        assert error.param == "max_model_len"
