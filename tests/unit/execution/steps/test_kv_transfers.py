"""Blocks on an accelerator move by one launch, and in the order of the calls."""

import pytest
import torch

from loraplex.core.plan import BlockCopy, BlockTransfer
from loraplex.execution.steps.kv_cache import KVCache
from loraplex.kernels.accelerator import Accelerator, HostAccelerator
from loraplex.kernels.ops import AttentionShape, KVStorage
from loraplex.kernels.reference import ReferenceKernels
from support.delayed_accelerator import DelayedAccelerator
from support.kv_caches import kv_cache

pytest.importorskip("triton")

NUM_BLOCKS, NUM_LAYERS, NUM_HOST_BLOCKS = 6, 2, 3
SHAPES = {
    "wide": AttentionShape(num_heads=4, num_kv_heads=2, head_dim=8, block_size=4),
    "narrow": AttentionShape(num_heads=1, num_kv_heads=1, head_dim=6, block_size=1),
    "long": AttentionShape(num_heads=2, num_kv_heads=2, head_dim=80, block_size=32),
}


def filled(accelerator: Accelerator, shape: AttentionShape, dtype: torch.dtype) -> KVCache:
    kernels = ReferenceKernels(torch.device("cpu"))
    capacities = [(NUM_BLOCKS, NUM_HOST_BLOCKS)]
    cache = kv_cache(capacities, [shape] * NUM_LAYERS, dtype, kernels, accelerator)
    generator = torch.Generator().manual_seed(0)
    for storage in cache.storages:
        for tensor in (storage.key, storage.value):
            tensor.copy_(torch.randint(-99, 99, tensor.shape, generator=generator))
    return cache


def contents(cache: KVCache) -> list[torch.Tensor]:
    """[blocks, all bytes] of each layer."""
    return [
        torch.cat([s.key.flatten(1).view(torch.uint8), s.value.flatten(1).view(torch.uint8)], 1)
        for s in cache.storages
    ]


@pytest.mark.parametrize("accelerator", [HostAccelerator(), DelayedAccelerator()], ids=["", "late"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_blocks_go_to_the_host_and_come_back_elsewhere(
    accelerator: Accelerator, dtype: torch.dtype, shape: AttentionShape
) -> None:
    cache = filled(accelerator, shape, dtype)
    before = [layer.clone() for layer in contents(cache)]
    cache.offload_blocks([BlockTransfer(0, 1, 2), BlockTransfer(0, 4, 0)])
    for storage in cache.storages:
        storage.key.zero_()
        storage.value.zero_()
    cache.load_blocks([BlockTransfer(0, 3, 2), BlockTransfer(0, 1, 0)])
    for layer, was in zip(contents(cache), before, strict=True):
        assert torch.equal(layer[3], was[1])
        assert torch.equal(layer[1], was[4])
        assert not layer[[0, 2, 4, 5]].any()


@pytest.mark.parametrize(
    "pairs", [[(1, 3), (4, 5)], [(1, 3), (3, 4), (1, 0)], [(1, 3), (3, 1)], [(2, 2)], []]
)
def test_copies_happen_at_once_in_every_layer(pairs: list[tuple[int, int]]) -> None:
    cache = filled(HostAccelerator(), SHAPES["wide"], torch.float16)
    expected = [layer.clone() for layer in contents(cache)]
    for layer in expected:
        if pairs:
            sources, targets = zip(*pairs, strict=True)
            layer[list(targets)] = layer[list(sources)]
    cache.copy_blocks([BlockCopy(0, source, target) for source, target in pairs])
    for layer, wanted in zip(contents(cache), expected, strict=True):
        assert torch.equal(layer, wanted)


def test_a_block_may_be_offloaded_and_its_place_loaded_in_one_step() -> None:
    """Follow the order of a plan: offloads, loads, copies."""
    cache = filled(HostAccelerator(), SHAPES["wide"], torch.float16)
    before = [layer.clone() for layer in contents(cache)]
    cache.offload_blocks([BlockTransfer(0, 1, 0)])
    cache.offload_blocks([BlockTransfer(0, 2, 1)])
    cache.load_blocks([BlockTransfer(0, 1, 1), BlockTransfer(0, 2, 0)])
    cache.copy_blocks([BlockCopy(0, 1, 5)])
    for layer, was in zip(contents(cache), before, strict=True):
        assert torch.equal(layer[[1, 2, 5]], was[[2, 1, 2]])


def test_blocks_are_made_in_a_queue_of_the_accelerator() -> None:
    """Their zeros must not come later than what a step writes."""
    accelerator, made = DelayedAccelerator(), []

    class WatchedKernels(ReferenceKernels):
        def allocate_kv(
            self, num_blocks: int, shape: AttentionShape, dtype: torch.dtype
        ) -> KVStorage:
            made.append(accelerator.event())  # raises outside both queues
            return super().allocate_kv(num_blocks, shape, dtype)

    kernels = WatchedKernels(torch.device("cpu"))
    shape = SHAPES["wide"]
    kv_cache([(NUM_BLOCKS, 0)], [shape] * NUM_LAYERS, torch.float32, kernels, accelerator)
    assert len(made) == NUM_LAYERS


@pytest.mark.parametrize("has_accelerator", [True, False])
def test_blocks_move_in_their_kv_group_alone(has_accelerator: bool) -> None:
    """Groups have different numbers of blocks, and may have different shapes."""
    shapes = [SHAPES["wide"], SHAPES["long"], SHAPES["wide"]]
    accelerator = HostAccelerator() if has_accelerator else None
    kernels = ReferenceKernels(torch.device("cpu"))
    cache = kv_cache([(6, 3), (4, 2)], shapes, torch.float32, kernels, accelerator)
    assert [len(storage.key) for storage in cache.storages] == [6, 4, 6]
    generator = torch.Generator().manual_seed(0)
    for storage in cache.storages:
        for tensor in (storage.key, storage.value):
            tensor.copy_(torch.randn(tensor.shape, generator=generator))
    before = [layer.clone() for layer in contents(cache)]
    cache.offload_blocks([BlockTransfer(1, 3, 0), BlockTransfer(0, 3, 2), BlockTransfer(0, 1, 0)])
    cache.copy_blocks([BlockCopy(1, 0, 3), BlockCopy(0, 5, 3)])
    cache.load_blocks([BlockTransfer(0, 0, 2), BlockTransfer(1, 2, 0), BlockTransfer(0, 4, 0)])
    first, second, third = contents(cache)
    for layer, was in ((first, before[0]), (third, before[2])):
        assert torch.equal(layer, was[[3, 1, 2, 5, 1, 5]])
    assert torch.equal(second, before[1][[0, 1, 3, 0]])
