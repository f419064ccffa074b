"""Row layers over ranks on GPUs: simulated on one, and over NCCL where there are two or more."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from loraplex.kernels.accelerator import CudaAccelerator
from loraplex.kernels.channel import DeviceChannel, tree_sum
from loraplex.kernels.cuda.backend import CudaKernels
from loraplex.kernels.cuda.channel import ChannelStore, DistributedChannel
from loraplex.kernels.cuda.ranks import sum_of_shares
from support.ranks_in_turns import ranks_in_turns

pytestmark = pytest.mark.gpu

IN, OUT = 4096, 2048
TOLERANCE = 8e-3
"""Relative to the largest output, in bfloat16."""


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.default_generator.manual_seed(0)


def row_layer(
    channel: DeviceChannel, device: torch.device, weight: torch.Tensor, x: torch.Tensor
) -> torch.Tensor:
    """Compute x weight^T on this rank, alone and as a recorded step, whose bits must agree."""
    accelerator = CudaAccelerator(device)
    kernels = CudaKernels(accelerator, channel=channel)
    size = IN // channel.size
    own = slice(channel.rank * size, (channel.rank + 1) * size)
    with torch.inference_mode(), accelerator.compute():
        inputs = x[:, own].to(device)
        packed = kernels.pack_linear(weight[:, own].contiguous().to(device), None, num_blocks=1)
        computed = kernels.linear(inputs, packed).cpu()
        with kernels.recording():
            result = kernels.repeat("step", (inputs,), lambda: kernels.linear(inputs, packed))
        recorded = result.cpu()
        kernels.forget_recorded()
    assert torch.equal(computed, recorded)
    return computed


@pytest.mark.parametrize("num_shares", [2, 4, 8])
def test_shares_are_added_as_a_tree(num_shares: int) -> None:
    shares = torch.randn(num_shares, 33, OUT, device="cuda")
    assert torch.equal(sum_of_shares(shares, None, torch.float32), tree_sum(list(shares)))


@pytest.mark.parametrize("num_rows", [1, 300])
def test_ranks_on_one_gpu(num_rows: int) -> None:
    """Exchanges through the host's threads cannot be recorded."""
    weight = (torch.randn(OUT, IN) / 64).bfloat16()
    x = torch.randn(num_rows, IN).bfloat16()
    device = torch.device("cuda", torch.cuda.current_device())

    def body(channel: DeviceChannel) -> torch.Tensor:
        kernels = CudaKernels(CudaAccelerator(device), channel=channel)
        size = IN // channel.size
        own = slice(channel.rank * size, (channel.rank + 1) * size)
        packed = kernels.pack_linear(weight[:, own].contiguous().to(device), None, num_blocks=1)
        result = kernels.linear(x[:, own].to(device), packed).cpu()
        torch.cuda.synchronize()
        return result

    check(ranks_in_turns(4, body), x, weight)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are not two GPUs")
@pytest.mark.parametrize("num_rows", [1, 300])
def test_ranks_on_two_gpus(num_rows: int) -> None:
    weight = (torch.randn(OUT, IN) / 64).bfloat16()
    x = torch.randn(num_rows, IN).bfloat16()
    listening = ChannelStore.listen()
    stores = [listening, ChannelStore.reach(listening.address)]

    def body(rank: int) -> torch.Tensor:
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
        channel = DistributedChannel(stores[rank], "steps", rank, 2, device)
        return row_layer(channel, device, weight, x)

    check(together(body), x, weight)


def together(body: Callable[[int], Any]) -> list[Any]:
    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(body, range(2)))


def check(results: list[torch.Tensor], x: torch.Tensor, weight: torch.Tensor) -> None:
    assert all(torch.equal(result, results[0]) for result in results), "the ranks differ"
    expected = x.float() @ weight.float().t()
    assert float((results[0] - expected).abs().max() / expected.abs().max()) < TOLERANCE
