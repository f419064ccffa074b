"""Ranks agree about adapters, or none of them has what one lacks."""

import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from loraplex.core.errors import AdapterLoadError, InvalidAdapterError
from loraplex.execution.adapters.loader import agreed
from loraplex.kernels.native.channel import Segment, SharedMemoryChannel
from loraplex.kernels.native.library import load_library
from support.naming import naming


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
        assert re.search(naming(1, 3), other.message)


def test_a_long_message_is_cut() -> None:
    def work(rank: int, channel: SharedMemoryChannel) -> None:
        def attempt() -> None:
            if rank == 0:
                raise AdapterLoadError("long word " * 10_000)

        agreed(channel, attempt)

    _, other = on_ranks(2, work)
    assert 1000 < len(other.message) < 3000
