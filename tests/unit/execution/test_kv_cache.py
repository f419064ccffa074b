"""Block copies, and the arithmetic of a block."""

import torch

from loraplex.core.plan import BlockCopy
from loraplex.execution.kv_cache import KVCache, block_bytes
from loraplex.kernels.dispatch import select_kernels
from loraplex.kernels.ops import AttentionShape

SHAPE = AttentionShape(num_heads=4, num_kv_heads=2, head_dim=8, block_size=4)


def make_cache(num_blocks: int = 5) -> KVCache:
    kernels = select_kernels(torch.device("cpu"))
    return KVCache(num_blocks, 3, SHAPE, torch.float16, kernels)


def test_bytes() -> None:
    assert make_cache(5).num_bytes == 5 * block_bytes(3, SHAPE, torch.float16)
    assert block_bytes(3, SHAPE, torch.float16) == 3 * 2 * 2 * 8 * 4 * 2


def test_copies_happen_at_once_in_every_layer() -> None:
    cache = make_cache()
    for layer, storage in enumerate(cache.storages):
        for block in range(5):
            storage.key[block] = 10 * layer + block
            storage.value[block] = 10 * layer + block + 0.5
    cache.copy_blocks([BlockCopy(0, 1, 3), BlockCopy(0, 3, 4), BlockCopy(0, 1, 0)])
    for layer, storage in enumerate(cache.storages):
        contents = [block.unique().tolist() for block in storage.key]
        assert contents == [[10 * layer + source] for source in (1, 1, 2, 1, 3)]
        contents = [block.unique().tolist() for block in storage.value]
        assert contents == [[10 * layer + source + 0.5] for source in (1, 1, 2, 1, 3)]


def test_nothing_to_copy() -> None:
    cache = make_cache()
    cache.storages[0].key.fill_(1)
    cache.copy_blocks([])
    assert (cache.storages[0].key == 1).all()
