"""Multi-head latent attention (arXiv:2405.04434): its values, and what they mean for caches,
weights and ranks.

Keys and values of all heads are linear in one latent vector of a position. It is computed in the
absorbed form: queries are brought to the latent's space, so that attention has one key head, of the
latent and of what turns with the position, and its values are the latent.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Final

from loraplex.core.cache import Blocks, CachedVectors
from loraplex.models.linear_group import TensorShard, share_of
from loraplex.models.specs.part import (
    Divided,
    LayerCache,
    MixerSpec,
    NormSpec,
    RopeConfig,
    Split,
    TensorSpec,
)

LATENT_DOWN: Final = "latent_down"
"""Linear layers of the queries' latent vector, where there is one, and of the position's: the
latent, then what turns. Whole on each rank."""
LATENT_QUERY: Final = "latent_query"
"""Linear layer of the queries: of each head the part that does not turn, then what turns."""
LATENT_HEADS: Final = "latent_heads"
"""Linear layer of the latent, which absorption takes apart: of each head keys, then values."""
LATENT_OUT: Final = "latent_attention_out"
QUERY_NORM: Final = "query_norm"
LATENT_NORM: Final = "latent_norm"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LatentSpec(MixerSpec):
    """Causal self-attention of one layer over latent vectors."""

    num_heads: int
    latent_size: int
    """Size of a position's latent vector."""
    key_size: int
    """Size of the part of a head's keys that does not turn."""
    rope_size: int
    """Size of the part that turns; keys of all heads share it."""
    value_size: int
    query_size: int | None
    """Size of the queries' latent vector; None: queries are made of the hidden state."""
    rope: RopeConfig
    scale: float
    """Factor of the scores."""
    latent_norm: NormSpec
    query_norm: NormSpec | None = None
    query_growth: RopeConfig | None = None
    """Factor of whole queries by their position (growth_alone), where there is one."""

    @property
    def cached_size(self) -> int:
        """Return the size of what is kept of a position: the latent, then the key that turns."""
        return self.latent_size + self.rope_size

    @property
    def head_outputs(self) -> int:
        """Return the number of outputs of a head in LATENT_HEADS."""
        return self.key_size + self.value_size

    def caches(self) -> tuple[LayerCache, ...]:
        return (LayerCache(Blocks(), (CachedVectors(1, self.cached_size),)),)

    def tensors(self) -> Mapping[str, NormSpec | TensorSpec]:
        found: dict[str, NormSpec | TensorSpec] = {LATENT_NORM: self.latent_norm}
        return found if self.query_norm is None else {QUERY_NORM: self.query_norm, **found}

    def ropes(self) -> Mapping[RopeConfig, int]:
        turned = {self.rope: self.rope_size}
        if self.query_growth is not None:
            turned[self.query_growth] = self.key_size + self.rope_size
        return turned

    def divisors(self) -> Sequence[Divided]:
        return (Divided(f"{self.num_heads} heads of latent attention", self.num_heads),)

    def shard(self, place: TensorShard) -> tuple["LatentSpec", Mapping[str, Split]]:
        heads = share_of(self.num_heads, *place)
        return dataclasses.replace(self, num_heads=heads.size), {
            LATENT_QUERY: Split(outputs=(heads.times(self.key_size + self.rope_size),)),
            LATENT_HEADS: Split(outputs=(heads.times(self.head_outputs),)),
            LATENT_OUT: Split(inputs=heads.times(self.value_size)),
        }

    def step_bytes(self, itemsize: int) -> int:
        of_head = self.key_size + self.rope_size + 2 * self.latent_size + self.value_size
        whole = (self.query_size or 0) + self.cached_size + self.latent_size
        return (self.num_heads * of_head + whole) * itemsize
