"""KV caches of a few layers, for tests without a model."""

from collections.abc import Sequence

import torch

from loraplex.core.cache import Blocks, CachedVectors
from loraplex.core.plan import CacheGroupCapacity
from loraplex.execution.steps.kv_cache import KVCache
from loraplex.kernels.accelerator import Accelerator
from loraplex.kernels.ops import AttentionShape, Kernels
from loraplex.models.cache_groups import CacheGroup


def kv_cache(
    capacities: Sequence[tuple[int, int]],
    shapes: Sequence[AttentionShape],
    dtype: torch.dtype,
    kernels: Kernels,
    accelerator: Accelerator | None = None,
) -> KVCache:
    """Make a cache whose layers belong to the cache groups in turn: 0, 1, 0, 1, ... with two.

    capacities: (blocks, host blocks) of each group. shapes: of each layer.
    """
    num_groups = len(capacities)
    groups = [
        CacheGroup(
            layers=tuple(range(first, len(shapes), num_groups)),
            spec=Blocks(),
            storage=(CachedVectors(shapes[first].num_kv_heads, shapes[first].head_dim),) * 2,
        )
        for first in range(num_groups)
    ]
    return KVCache(
        groups,
        [
            CacheGroupCapacity(num_blocks=num_blocks, num_host_blocks=num_host_blocks)
            for num_blocks, num_host_blocks in capacities
        ],
        shapes,
        dtype,
        kernels,
        accelerator=accelerator,
    )
