"""Row layers over ranks on GPUs: simulated on one, and over NCCL where there are two or more."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
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
    weight, x = random_layer(num_rows)
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
    """A process for each rank, as engines have: communicators of one process can wait in a ring."""
    weight, x = random_layer(num_rows)
    store = ChannelStore.listen()
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(2, mp_context=context) as processes:
        ranks = [processes.submit(rank_of_two, rank, store.address, num_rows) for rank in range(2)]
        results = [torch.tensor(rank.result(timeout=300)) for rank in ranks]
    check(results, x, weight)


def rank_of_two(rank: int, address: str, num_rows: int, device_type: str = "cuda") -> Any:
    """Return the result as lists: tensors of another process would be shared memory."""
    device = torch.device(device_type, rank)
    if device_type == "cuda":
        torch.cuda.set_device(device)
    channel = DistributedChannel(ChannelStore.reach(address), "steps", rank, 2, device)
    return row_layer(channel, device, *random_layer(num_rows)).tolist()


def random_layer(num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weight and the input, equal in every process."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(OUT, IN, generator=generator) / 64
    return weight.bfloat16(), torch.randn(num_rows, IN, generator=generator).bfloat16()


def check(results: list[torch.Tensor], x: torch.Tensor, weight: torch.Tensor) -> None:
    assert all(torch.equal(result, results[0]) for result in results), "the ranks differ"
    expected = x.float() @ weight.float().t()
    assert float((results[0] - expected).abs().max() / expected.abs().max()) < TOLERANCE
