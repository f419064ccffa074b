"""Block copies, and the arithmetic of a block."""

import itertools

import pytest
import torch

from loraplex.core.cache import Blocks, CachedFloats, CachedVectors, States
from loraplex.core.plan import BlockCopy, BlockTransfer, CacheGroupCapacity
from loraplex.execution.steps.kv_cache import KVCache
from loraplex.kernels.accelerator import HostAccelerator
from loraplex.kernels.dispatch import select_kernels
from loraplex.kernels.ops import AttentionRules, AttentionShape, Kernels, RowLayout, Storage
from loraplex.kernels.reference import ReferenceKernels
from loraplex.models.cache_groups import LayerGroup, storage_bytes
from support.kv_caches import by_layer, kv_cache

SHAPE = AttentionShape(num_heads=4, num_kv_heads=2, head_dim=8, block_size=4)


CPU = torch.device("cpu")


def make_cache(num_blocks: int = 5) -> KVCache:
    kernels = select_kernels(torch.device("cpu"))
    return kv_cache([(num_blocks, 0)], [SHAPE] * 3, torch.float16, kernels)


def test_bytes() -> None:
    assert make_cache(5).num_bytes == 5 * 3 * SHAPE.block_bytes(torch.float16)
    assert 3 * SHAPE.block_bytes(torch.float16) == 3 * 2 * 2 * 8 * 4 * 2


def test_copies_happen_at_once_in_every_layer() -> None:
    cache = make_cache()
    for layer, storage in enumerate(by_layer(cache.storages)):
        for block in range(5):
            storage.tensors[0][block] = 10 * layer + block
            storage.tensors[1][block] = 10 * layer + block + 0.5
    cache.copy_blocks([BlockCopy(0, 1, 3), BlockCopy(0, 3, 4), BlockCopy(0, 1, 0)])
    for layer, storage in enumerate(by_layer(cache.storages)):
        contents = [block.unique().tolist() for block in storage.tensors[0]]
        assert contents == [[10 * layer + source] for source in (1, 1, 2, 1, 3)]
        contents = [block.unique().tolist() for block in storage.tensors[1]]
        assert contents == [[10 * layer + source + 0.5] for source in (1, 1, 2, 1, 3)]


def test_nothing_to_copy() -> None:
    cache = make_cache()
    by_layer(cache.storages)[0].tensors[0].fill_(1)
    cache.copy_blocks([])
    assert (by_layer(cache.storages)[0].tensors[0] == 1).all()


def test_blocks_go_to_the_host_and_come_back_elsewhere() -> None:
    cache = kv_cache([(5, 3)], [SHAPE] * 3, torch.float16, select_kernels(CPU))
    assert cache.num_bytes == 5 * 3 * SHAPE.block_bytes(torch.float16)
    assert sum(host.num_bytes for host in by_layer(cache.host_storages)) == cache.num_bytes // 5 * 3
    for layer, storage in enumerate(by_layer(cache.storages)):
        for block in range(5):
            storage.tensors[0][block] = 10 * layer + block
            storage.tensors[1][block] = 10 * layer + block + 0.5
    cache.offload_blocks([BlockTransfer(0, 1, 2), BlockTransfer(0, 4, 0)])
    for storage in by_layer(cache.storages):
        storage.tensors[0].zero_()
        storage.tensors[1].zero_()
    cache.load_blocks([BlockTransfer(0, 3, 2), BlockTransfer(0, 1, 0)])
    for layer, storage in enumerate(by_layer(cache.storages)):
        contents = [block.unique().tolist() for block in storage.tensors[0]]
        assert contents == [[0], [10 * layer + 4], [0], [10 * layer + 1], [0]]
        contents = [block.unique().tolist() for block in storage.tensors[1]]
        assert contents == [[0], [10 * layer + 4.5], [0], [10 * layer + 1.5], [0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
@pytest.mark.parametrize("kernels", [select_kernels(CPU), ReferenceKernels(CPU)], ids=["", "torch"])
def test_a_copied_block_is_read_as_the_original(kernels: Kernels, dtype: torch.dtype) -> None:
    torch.default_generator.manual_seed(0)
    cache = kv_cache([(5, 0)], [SHAPE] * 2, dtype, kernels)
    assert cache.num_bytes == 5 * 2 * SHAPE.block_bytes(dtype)
    key, value = torch.randn(2, 4, SHAPE.num_kv_heads, SHAPE.head_dim)
    query = torch.randn(4, SHAPE.num_heads, SHAPE.head_dim)
    for storage in by_layer(cache.storages):
        kernels.write_kv(storage, key, value, torch.arange(4, 8))
    cache.copy_blocks([BlockCopy(0, 1, 3)])

    def attended(layer: int, block: int) -> torch.Tensor:
        rows = RowLayout([0, 4], [4], torch.tensor([[block]]))
        plan = kernels.plan_attention(rows, SHAPE, AttentionRules(scale=SHAPE.head_dim**-0.5))
        return kernels.paged_attention(query, by_layer(cache.storages)[layer], plan)

    for layer, block in itertools.product(range(2), (1, 3)):
        assert torch.equal(attended(layer, block), attended(0, 1))
    assert not torch.equal(attended(0, 2), attended(0, 1))


@pytest.mark.parametrize("accelerator", [None, HostAccelerator()], ids=["host", "accelerator"])
def test_a_layer_may_have_storages_in_several_groups(accelerator: HostAccelerator | None) -> None:
    """They have tensors of their own sorts, and their blocks move alone."""
    pair = (CachedVectors(2, 8),) * 2
    others = (CachedVectors(1, 6), CachedFloats((3, 5)), CachedFloats((2,), is_per_position=True))
    groups = [
        LayerGroup(layers=(0, 1), spec=Blocks(), storage=pair),
        LayerGroup(layers=(1,), spec=States(4), storage=others),
    ]
    capacities = [CacheGroupCapacity(num_blocks=count, num_host_blocks=3) for count in (5, 4)]
    kernels = ReferenceKernels(CPU)
    cache = KVCache(
        *(groups, capacities, 2, 4, torch.bfloat16, kernels), device=CPU, accelerator=accelerator
    )
    assert cache.storages[1][0] is None
    assert isinstance(cache.storages[0][0], Storage)
    moved = cache.storages[1][1]
    assert moved is not None
    vectors, of_block, of_positions = moved.tensors
    assert (vectors.shape, vectors.dtype) == ((4, 1, 4, 6), torch.bfloat16)
    assert (of_block.shape, of_block.dtype) == ((4, 3, 5), torch.float32)
    assert (of_positions.shape, of_positions.dtype) == ((4, 4, 2), torch.float32)
    sizes = [storage_bytes(group.storage, 4, torch.bfloat16) for group in groups]
    assert cache.num_bytes == 5 * 2 * sizes[0] + 4 * sizes[1]
    for tensor in moved.tensors:
        tensor[1], tensor[2] = 1, 2
    cache.copy_blocks([BlockCopy(1, 1, 3)])
    cache.offload_blocks([BlockTransfer(1, 2, 0)])
    cache.load_blocks([BlockTransfer(1, 0, 0)])
    for tensor in moved.tensors:
        assert [block.unique().tolist() for block in tensor] == [[2], [1], [2], [1]]
    assert not any(tensor.any() for storage in cache.storages[0] for tensor in storage.tensors)
