"""KV caches of a few layers, for tests without a model."""

from collections.abc import Sequence

import torch

from loraplex.core.cache import Blocks, CachedVectors
from loraplex.core.plan import CacheGroupCapacity
from loraplex.execution.steps.kv_cache import KVCache
from loraplex.kernels.accelerator import Accelerator
from loraplex.kernels.ops import AttentionShape, Kernels, Storage
from loraplex.models.cache_groups import LayerGroup
from loraplex.models.mixers.mixer import Storages


def kv_cache(
    capacities: Sequence[tuple[int, int]],
    shapes: Sequence[AttentionShape],
    dtype: torch.dtype,
    kernels: Kernels,
    accelerator: Accelerator | None = None,
) -> KVCache:
    """Make a cache whose layers belong to the cache groups in turn: 0, 1, 0, 1, ... with two.

    capacities: (blocks, host blocks) of each group. shapes: of each layer; their block size is the
    first one's.
    """
    num_groups = len(capacities)
    groups = [
        LayerGroup(
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
        len(shapes),
        shapes[0].block_size,
        dtype,
        kernels,
        device=torch.device("cpu") if accelerator is None else accelerator.device,
        accelerator=accelerator,
    )


def by_layer(storages: Storages) -> tuple[Storage, ...]:
    """Return the storage of each layer, which all have one."""
    return tuple(
        storage
        for of_groups in zip(*storages, strict=True)
        for storage in of_groups
        if storage is not None
    )
