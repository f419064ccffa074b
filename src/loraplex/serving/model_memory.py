"""What one model takes, tier by tier, and how many more adapters fit: for operators."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from loraplex.core.adapter import LoraTarget
from loraplex.core.cache import Cross, States
from loraplex.core.config import ModelConfig
from loraplex.core.plan import CacheGroupCapacity, Capacity
from loraplex.core.stats import CacheGroupStats, EngineStats
from loraplex.memory.adapter_pages import pages_at_ranks


class CacheGroupMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks of the layers that have one attention window, or recurrent states."""

    attention_window: int | None
    """Most positions that these layers see, in a window or in chunks; None: all."""
    state_tokens: int = 0
    """Tokens between recurrent states, each of which is a block; 0: blocks of positions."""
    is_of_encoder: bool = False
    """Whether the positions are those of an encoder's input, which cross attention reads."""
    blocks: int
    block_bytes: int = 0
    """Bytes of a block in all these layers of one rank."""
    held: int = 0
    cached: int = 0
    free: int = 0
    host_blocks: int = 0
    host_used: int = 0


class KVMemory(msgspec.Struct, frozen=True, kw_only=True):
    """The KV cache. Blocks of all cache groups are counted together."""

    num_bytes: int
    """Size of all blocks in bytes."""
    block_tokens: int
    blocks: int
    tokens: int
    """Tokens that fit, of the layers with the largest window."""
    held: int = 0
    """Blocks of running sequences."""
    cached: int = 0
    """Blocks kept for equal prompt beginnings; they are freed when others need them."""
    free: int = 0
    host_blocks: int = 0
    """Blocks on the host, for preempted sequences."""
    host_used: int = 0
    groups: tuple[CacheGroupMemory, ...] = ()
    """Each cache group, if layers have different attention windows."""


class RankFit(msgspec.Struct, frozen=True, kw_only=True):
    """Adapters of one rank, on every module of every layer, in the device tier."""

    rank: int
    """Rank on each module; on those with a smaller maximum rank that."""
    pages: int
    """Pages of one adapter."""
    holds: int
    """Adapters at once, if no other is there."""
    more: int
    """Further adapters without an eviction."""


class DeviceTier(msgspec.Struct, frozen=True, kw_only=True):
    num_bytes: int
    page_bytes: int
    pages: int
    table_bytes: int = 0
    """Size of the tables of what is in the pages, in addition to num_bytes."""
    pages_used: int = 0
    adapters: int = 0
    held: int = 0
    """Adapters that stay there: pinned ones."""
    fits: tuple[RankFit, ...] = ()
    """Numbers for the usual and for the largest rank."""


class HostTier(msgspec.Struct, frozen=True, kw_only=True):
    num_bytes: int
    bytes_used: int = 0
    adapters: int = 0


class StoredAdapters(msgspec.Struct, frozen=True, kw_only=True):
    """Canonical adapter files on the disk; versions of an adapter, and names, may share one."""

    adapters: int
    files: int
    num_bytes: int


class AcceleratorMemory(msgspec.Struct, frozen=True, kw_only=True):
    """A device's own memory, as it was when the engine had started."""

    total: int
    free: int
    """Bytes that no step uses or will use."""
    other: int
    """Bytes neither free nor reported elsewhere: programs, buffers, other processes."""


class ModelMemory(msgspec.Struct, frozen=True, kw_only=True):
    max_num_seqs: int
    """Most sequences in a step."""
    max_num_batched_tokens: int
    """Most tokens in a step."""
    weights_bytes: int
    workspace_bytes: int = 0
    """Left for what a step computes with; 0 on a CPU."""
    graph_bytes: int = 0
    """Bytes of recorded steps."""
    kv: KVMemory
    device: DeviceTier
    host: HostTier
    accelerator: AcceleratorMemory | None = None
    """None: the device has no memory of its own."""


def memory_of(
    capacity: Capacity,
    stats: EngineStats,
    *,
    targets: Sequence[LoraTarget],
    model: ModelConfig,
) -> ModelMemory:
    """Return the memory. targets: all linear layers that adapters may change."""
    tiers, geometry, limits = stats.adapters, capacity.page_geometry, model.rank_limits
    held = capacity.held(targets)

    def pages(rank: int) -> int:
        return max(pages_at_ranks(stage, limits.at_most(rank), geometry) for stage in held)

    ranks = sorted({min(model.optimal_lora_rank, limits.largest), limits.largest})
    return ModelMemory(
        max_num_seqs=capacity.max_num_seqs,
        max_num_batched_tokens=capacity.max_num_batched_tokens,
        weights_bytes=capacity.weights_bytes,
        workspace_bytes=capacity.workspace_bytes,
        graph_bytes=capacity.graph_bytes,
        kv=_kv_memory(capacity, stats),
        device=DeviceTier(
            num_bytes=capacity.num_adapter_pages * capacity.adapter_page_bytes,
            page_bytes=capacity.adapter_page_bytes,
            pages=capacity.num_adapter_pages,
            table_bytes=capacity.adapter_table_bytes,
            pages_used=tiers.device_pages_used,
            adapters=tiers.num_on_device,
            held=tiers.num_held,
            fits=tuple(_fit(rank, pages(rank), capacity, stats) for rank in ranks),
        ),
        host=HostTier(
            num_bytes=model.lora_host_bytes,
            bytes_used=tiers.host_bytes_used,
            adapters=tiers.num_on_host,
        ),
        accelerator=_accelerator(capacity),
    )


def _kv_memory(capacity: Capacity, stats: EngineStats) -> KVMemory:
    groups, block_tokens = capacity.cache_groups, capacity.block_size
    num_blocks = sum(group.num_blocks for group in groups)
    return KVMemory(
        num_bytes=capacity.kv_cache_bytes,
        block_tokens=block_tokens,
        blocks=num_blocks,
        tokens=groups[0].num_blocks * block_tokens,
        held=stats.blocks_held,
        cached=stats.blocks_cached,
        free=num_blocks - stats.blocks_held - stats.blocks_cached,
        host_blocks=sum(group.num_host_blocks for group in groups),
        host_used=stats.blocks_on_host,
        groups=_cache_groups(groups, stats) if len(groups) > 1 else (),
    )


def _cache_groups(
    groups: Sequence[CacheGroupCapacity], stats: EngineStats
) -> tuple[CacheGroupMemory, ...]:
    """Return the memory of each group; without statistics, that of an engine at rest."""
    counts = stats.cache_groups or (CacheGroupStats(),) * len(groups)
    return tuple(
        CacheGroupMemory(
            attention_window=group.spec.reach,
            state_tokens=group.spec.every if isinstance(group.spec, States) else 0,
            is_of_encoder=isinstance(group.spec, Cross),
            blocks=group.num_blocks,
            block_bytes=group.block_bytes,
            held=count.held,
            cached=count.cached,
            free=group.num_blocks - count.held - count.cached,
            host_blocks=group.num_host_blocks,
            host_used=count.on_host,
        )
        for group, count in zip(groups, counts, strict=True)
    )


def _accelerator(capacity: Capacity) -> AcceleratorMemory | None:
    total, free = capacity.device_bytes, capacity.device_free_bytes
    if not total:
        return None
    advice = (
        *(capacity.weights_bytes, capacity.workspace_bytes, capacity.graph_bytes),
        *(capacity.kv_cache_bytes, capacity.num_adapter_pages * capacity.adapter_page_bytes),
        capacity.adapter_table_bytes,
    )
    return AcceleratorMemory(total=total, free=free, other=max(total - free - sum(advice), 0))


def _fit(rank: int, pages: int, capacity: Capacity, stats: EngineStats) -> RankFit:
    free = capacity.num_adapter_pages - stats.adapters.device_pages_used
    return RankFit(
        rank=rank, pages=pages, holds=capacity.num_adapter_pages // pages, more=free // pages
    )


def stored(num_names: int, paths: Iterable[str]) -> StoredAdapters:
    """Looks at the files: not for the event loop. A file that is gone counts nothing."""
    sizes = [_size(Path(path)) for path in set(paths)]
    found = [size for size in sizes if size is not None]
    return StoredAdapters(adapters=num_names, files=len(found), num_bytes=sum(found))


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None
