"""Cross attention: its values, and what they mean for caches, weights and ranks."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Final

from loraplex.core.cache import CachedVectors, Cross
from loraplex.models.linear_group import OutputSpan, TensorShard, share_of
from loraplex.models.specs.part import (
    Divided,
    LayerCache,
    MixerSpec,
    NormSpec,
    RopeConfig,
    Split,
    TensorSpec,
)

CROSS_QUERY: Final = "cross_q"
CROSS_KV: Final = "cross_kv"
"""Keys, then values: what it reads is the encoder's output."""
CROSS_OUTPUT: Final = "cross_o"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CrossSpec(MixerSpec):
    """Attention of each position of a decoder to all positions of its encoder's input."""

    num_heads: int
    head_dim: int
    scale: float
    """Factor of the scores."""

    @property
    def size(self) -> int:
        return self.num_heads * self.head_dim

    def caches(self) -> tuple[LayerCache, ...]:
        vectors = CachedVectors(self.num_heads, self.head_dim)
        return (LayerCache(Cross(), (vectors, vectors)),)

    def tensors(self) -> Mapping[str, NormSpec | TensorSpec]:
        return {}

    def ropes(self) -> Mapping[RopeConfig, int]:
        return {}

    def divisors(self) -> Sequence[Divided]:
        return (Divided(f"{self.num_heads} heads of cross attention", self.num_heads),)

    def shard(self, place: TensorShard) -> tuple["CrossSpec", Mapping[str, Split]]:
        own = share_of(self.num_heads, *place)
        units = own.times(self.head_dim)
        both: tuple[OutputSpan, ...] = (units, units.moved(self.size))
        return dataclasses.replace(self, num_heads=own.size), {
            CROSS_QUERY: Split(outputs=(units,)),
            CROSS_KV: Split(outputs=both),
            CROSS_OUTPUT: Split(inputs=units),
        }

    def step_bytes(self, itemsize: int) -> int:
        return 2 * self.size * itemsize
