"""Ranks of one engine, and what all of them must have equal."""

from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from loraplex.core.cache import CacheSpec
from loraplex.core.errors import ConfigError
from loraplex.core.plan import Capacity

_SMALLEST: Final = ("max_model_len", "num_adapter_pages")
"""Limits of which the smallest one counts."""
_EQUAL: Final = (
    *("block_size", "max_num_seqs", "max_num_batched_tokens", "num_stages", "vocab_size"),
    *("rotation_border", "page_geometry", "keeps_host_copy"),
)


class World(msgspec.Struct, frozen=True):
    """Place of one rank among all ranks of an engine: stage by stage, tensor rank by rank."""

    rank: int = 0
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1

    @property
    def size(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def tensor_rank(self) -> int:
        return self.rank % self.tensor_parallel_size

    @property
    def stage(self) -> int:
        return self.rank // self.tensor_parallel_size

    @property
    def stage_leader(self) -> int:
        """Rank that makes the channels of its stage."""
        return self.rank - self.tensor_rank

    def others(self) -> tuple["World", ...]:
        """Return the place of each other rank, in the order of the ranks."""
        ranks = (rank for rank in range(self.size) if rank != self.rank)
        return tuple(msgspec.structs.replace(self, rank=rank) for rank in ranks)


def check_traits(mine: Mapping[str, str], rank: int, theirs: Mapping[str, str]) -> None:
    """Raise ConfigError, which names both values, if a rank differs from rank 0."""
    for name in (*mine, *(name for name in theirs if name not in mine)):
        if mine.get(name) != theirs.get(name):
            raise ConfigError(
                f"the ranks of the engine must have the same {name}: rank 0 has "
                f"{mine.get(name, 'none')}, rank {rank} has {theirs.get(name, 'none')}"
            )


def agreed_capacity(capacities: Sequence[Capacity]) -> Capacity:
    """Return what all ranks can do. The sizes in bytes are those of the first one.

    Raises ConfigError if the ranks cannot compute the same plans.
    """
    first = capacities[0]
    for rank, capacity in enumerate(capacities):
        for name in _EQUAL:
            _require_equal(name, rank, getattr(first, name), getattr(capacity, name))
        _require_equal("cache", rank, _cache_specs(first), _cache_specs(capacity))
    groups = (
        msgspec.structs.replace(
            same[0],
            num_blocks=min(group.num_blocks for group in same),
            num_host_blocks=min(group.num_host_blocks for group in same),
        )
        for same in zip(*(capacity.cache_groups for capacity in capacities), strict=True)
    )
    smallest = {name: min(getattr(one, name) for one in capacities) for name in _SMALLEST}
    return msgspec.structs.replace(first, cache_groups=tuple(groups), **smallest)


def _cache_specs(capacity: Capacity) -> tuple[CacheSpec, ...]:
    return tuple(group.spec for group in capacity.cache_groups)


def _require_equal(name: str, rank: int, first: object, other: object) -> None:
    if first != other:
        raise ConfigError(
            f"the ranks of the engine have a different {name}: rank 0 has {first}, rank {rank} "
            f"has {other}"
        )
