"""Channels over torch.distributed: gloo between threads, as between the hosts of ranks."""

import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from loraplex.core.errors import ConfigError, DeviceLost, InternalError
from loraplex.kernels.channel import Channel, DeviceChannel, RankChannels
from loraplex.kernels.cuda.channel import ChannelStore, DistributedChannel, connect_channels
from support.naming import naming, refused

HOST = torch.device("cpu")
SIZE = 2


@pytest.fixture
def stores() -> list[ChannelStore]:
    """One for each rank."""
    listening = ChannelStore.listen()
    return [listening, ChannelStore.reach(listening.address)]


def together(work: Callable[[int], Any]) -> list[Any]:
    """Return work(rank) of all ranks."""
    with ThreadPoolExecutor(SIZE) as threads:
        futures = [threads.submit(work, rank) for rank in range(SIZE)]
    return [future.result() for future in futures]


@pytest.fixture
def ranks(stores: list[ChannelStore]) -> list[RankChannels]:
    return together(lambda rank: connect_channels(stores[rank], rank, SIZE, HOST))


def failure(channel: Channel) -> str:
    with pytest.raises(DeviceLost) as caught:
        channel.gather(torch.zeros(1))
    return str(caught.value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.uint8])
def test_every_rank_gets_all_tensors(ranks: list[RankChannels], dtype: torch.dtype) -> None:
    def exchange(rank: int) -> Any:
        tensor = torch.full((2, 3), rank + 1).to(dtype)
        return [channel.gather(tensor) for channel in ranks[rank]]

    for of_channel in together(exchange):
        for first, second in of_channel:
            assert torch.equal(first, torch.full((2, 3), 1).to(dtype))
            assert torch.equal(second, torch.full((2, 3), 2).to(dtype))


def test_parts_go_to_their_ranks(ranks: list[RankChannels]) -> None:
    def exchange(rank: int) -> Any:
        channel = ranks[rank].steps
        assert isinstance(channel, DeviceChannel)
        return channel.exchanged(torch.tensor([[10.0], [20.0]]) + rank)

    first, second = together(exchange)
    assert first.tolist() == [[10.0], [11.0]]
    assert second.tolist() == [[20.0], [21.0]]


def test_an_empty_tensor_is_a_barrier(ranks: list[RankChannels]) -> None:
    found = together(lambda rank: ranks[rank].steps.gather(torch.zeros(0, 3)))
    assert [[tensor.shape for tensor in tensors] for tensors in found] == [[(0, 3)] * SIZE] * SIZE


def test_an_abort_ends_the_waits_of_all_ranks(stores: list[ChannelStore]) -> None:
    # The end of this process waits for the time limit of what an abort left.
    limit = 5.0
    channels = together(
        lambda rank: DistributedChannel(stores[rank], "a", rank, SIZE, HOST, time_limit=limit)
    )
    others = together(lambda rank: DistributedChannel(stores[rank], "b", rank, SIZE, HOST))

    def body(rank: int) -> str:
        channel = channels[rank]
        if rank == 0:
            channel.abort("rank 0: out of memory")
            channel.abort("later")
        return failure(channel)

    assert together(body) == ["the ranks' exchange was aborted: rank 0: out of memory"] * SIZE
    assert [channel.abort_reason for channel in channels] == ["rank 0: out of memory"] * SIZE
    assert len(together(lambda rank: others[rank].gather(torch.zeros(1)))) == SIZE


def test_a_rank_that_does_not_come_is_named(stores: list[ChannelStore]) -> None:
    channels = together(
        lambda rank: DistributedChannel(stores[rank], "s", rank, SIZE, HOST, time_limit=0.2)
    )
    assert re.search(naming(0, 0.2), failure(channels[0]))


def test_time_that_a_rank_waits_is_counted(ranks: list[RankChannels]) -> None:
    def body(rank: int) -> float:
        if rank == 1:
            time.sleep(0.05)
        channel = ranks[rank].steps
        channel.gather(torch.zeros(1))
        assert isinstance(channel, DistributedChannel)
        return channel.wait_seconds

    assert together(body)[0] > 0.02


def test_a_wrong_address_is_refused() -> None:
    with pytest.raises(InternalError, match=naming(0, "nowhere")):
        ChannelStore.reach("nowhere")


@pytest.mark.skipif(torch.distributed.is_nccl_available(), reason="this torch was built with NCCL")
def test_a_gpu_needs_nccl(stores: list[ChannelStore]) -> None:
    with refused(ConfigError, "NCCL", "tensor_parallel_size", param="tensor_parallel_size"):
        DistributedChannel(stores[0], "steps", 0, SIZE, torch.device("cuda", 0))
