"""Blocks on an accelerator move by one launch, and in the order of the calls."""

import pytest
import torch

from loraplex.core.cache import Blocks, CachedVectors
from loraplex.core.plan import BlockCopy, BlockTransfer, CacheGroupCapacity
from loraplex.execution.steps.kv_cache import KVCache
from loraplex.execution.steps.kv_transfers import KVTransfers
from loraplex.kernels.accelerator import Accelerator, HostAccelerator
from loraplex.kernels.ops import AttentionShape, Storage
from loraplex.kernels.reference import ReferenceKernels
from loraplex.models.cache_groups import LayerGroup
from support.delayed_accelerator import DelayedAccelerator
from support.kv_caches import by_layer, kv_cache

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
    for storage in by_layer(cache.storages):
        for tensor in storage.tensors:
            tensor.copy_(torch.randint(-99, 99, tensor.shape, generator=generator))
    return cache


def contents(cache: KVCache) -> list[torch.Tensor]:
    """[blocks, all bytes] of each layer."""
    return [
        torch.cat([tensor.flatten(1).view(torch.uint8) for tensor in storage.tensors], 1)
        for storage in by_layer(cache.storages)
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
    for storage in by_layer(cache.storages):
        storage.tensors[0].zero_()
        storage.tensors[1].zero_()
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


@pytest.mark.parametrize(
    "sizes",
    [[(12,), (32, 5)], [(3, 4), (16,), (1,)], [(64,)]],
    ids=["a pair and one", "all sizes", "one tensor"],
)
def test_layers_of_a_group_may_have_pieces_of_several_sizes(sizes: list[tuple[int, ...]]) -> None:
    """sizes: numbers of a block of each tensor of each layer. Not all are multiples of 16 bytes."""
    generator = torch.Generator().manual_seed(0)
    storages = [
        Storage(tuple(torch.randn((NUM_BLOCKS, size), generator=generator) for size in of_layer))
        for of_layer in sizes
    ]
    transfers = KVTransfers(HostAccelerator(), storages, NUM_HOST_BLOCKS)
    tensors = [tensor for storage in storages for tensor in storage.tensors]
    before = [tensor.clone() for tensor in tensors]
    transfers.offload([(1, 2), (4, 0)])
    for tensor in tensors:
        tensor.zero_()
    transfers.load([(2, 3), (0, 1)])
    transfers.copy([(3, 5), (1, 3), (5, 1)])
    for tensor, was in zip(tensors, before, strict=True):
        assert torch.equal(tensor[5], was[1])
        assert torch.equal(tensor[3], was[4])
        assert not tensor[[0, 1, 2, 4]].any()


@pytest.mark.parametrize("accelerator", [None, HostAccelerator()], ids=["host", "accelerator"])
def test_a_stage_without_layers_of_a_group_has_none_of_its_blocks(
    accelerator: Accelerator | None,
) -> None:
    """Its plans move the blocks of all groups, as those of the other stages."""
    shape, kernels = SHAPES["wide"], ReferenceKernels(torch.device("cpu"))
    groups = [
        LayerGroup(
            layers=layers,
            spec=Blocks(window),
            storage=(CachedVectors(shape.num_kv_heads, shape.head_dim),) * 2,
        )
        for layers, window in (((), None), ((0, 1), 8))
    ]
    capacity = CacheGroupCapacity(num_blocks=NUM_BLOCKS, num_host_blocks=NUM_HOST_BLOCKS)
    cache = KVCache(
        groups,
        [capacity] * 2,
        2,
        shape.block_size,
        torch.float16,
        kernels,
        device=torch.device("cpu"),
        accelerator=accelerator,
    )
    for storage in by_layer(cache.storages):
        storage.tensors[0][1], storage.tensors[1][1] = 1, 2
    cache.copy_blocks([BlockCopy(0, 1, 4), BlockCopy(1, 1, 3)])
    cache.offload_blocks([BlockTransfer(0, 1, 2), BlockTransfer(1, 1, 2)])
    cache.load_blocks([BlockTransfer(0, 5, 2), BlockTransfer(1, 5, 2)])
    for storage in by_layer(cache.storages):
        assert storage.tensors[0].flatten(1).amax(1).tolist() == [0, 1, 0, 1, 0, 1]
        assert storage.tensors[1].flatten(1).amax(1).tolist() == [0, 2, 0, 2, 0, 2]


def test_blocks_are_made_in_a_queue_of_the_accelerator() -> None:
    """Their zeros must not come later than what a step writes."""
    accelerator, made = DelayedAccelerator(), []

    class WatchedKernels(ReferenceKernels):
        def allocate_kv(
            self, num_blocks: int, shape: AttentionShape, dtype: torch.dtype
        ) -> Storage:
            made.append(accelerator.event())  # raises outside both queues
            return super().allocate_kv(num_blocks, shape, dtype)

    kernels = WatchedKernels(torch.device("cpu"))
    shape = SHAPES["wide"]
    kv_cache([(NUM_BLOCKS, 0)], [shape] * NUM_LAYERS, torch.float32, kernels, accelerator)
    assert len(made) == NUM_LAYERS


@pytest.mark.parametrize("has_accelerator", [True, False])
def test_blocks_move_in_their_cache_group_alone(has_accelerator: bool) -> None:
    """Groups have different numbers of blocks, and may have different shapes."""
    shapes = [SHAPES["wide"], SHAPES["long"], SHAPES["wide"]]
    accelerator = HostAccelerator() if has_accelerator else None
    kernels = ReferenceKernels(torch.device("cpu"))
    cache = kv_cache([(6, 3), (4, 2)], shapes, torch.float32, kernels, accelerator)
    assert [len(storage.tensors[0]) for storage in by_layer(cache.storages)] == [6, 4, 6]
    generator = torch.Generator().manual_seed(0)
    for storage in by_layer(cache.storages):
        for tensor in storage.tensors:
            tensor.copy_(torch.randn(tensor.shape, generator=generator))
    before = [layer.clone() for layer in contents(cache)]
    cache.offload_blocks([BlockTransfer(1, 3, 0), BlockTransfer(0, 3, 2), BlockTransfer(0, 1, 0)])
    cache.copy_blocks([BlockCopy(1, 0, 3), BlockCopy(0, 5, 3)])
    cache.load_blocks([BlockTransfer(0, 0, 2), BlockTransfer(1, 2, 0), BlockTransfer(0, 4, 0)])
    first, second, third = contents(cache)
    for layer, was in ((first, before[0]), (third, before[2])):
        assert torch.equal(layer, was[[3, 1, 2, 5, 1, 5]])
    assert torch.equal(second, before[1][[0, 1, 3, 0]])
