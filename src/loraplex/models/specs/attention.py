"""Causal self-attention: its values, and what they mean for caches, weights and ranks."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from loraplex.core.cache import Blocks, CachedVectors
from loraplex.models.linear_group import OutputSpan, Share, TensorShard, share_of
from loraplex.models.specs.part import (
    Divided,
    LayerCache,
    MixerSpec,
    NormSpec,
    RopeConfig,
    Split,
    TensorSpec,
)

QKV: Final = "qkv"
OUTPUT: Final = "o"
Q_NORM: Final = "q_norm"
K_NORM: Final = "k_norm"
SINK_LOGITS: Final = "sink_logits"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec(MixerSpec):
    """Causal self-attention of one layer."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeConfig | None
    """None: the layer rotates nothing."""
    query_rope: RopeConfig | None = None
    """Embedding of the queries, where it differs from that of the keys."""
    scale: float | None = None
    """Factor of the scores; None: head_dim ** -0.5."""
    soft_cap: float | None = None
    """c of scores that become c * tanh(score / c)."""
    alibi_slopes: tuple[float, ...] = ()
    """AttentionRules.alibi_slopes"""
    sink_logits: str = ""
    """Full name of a tensor [num_heads] with one more logit per head; empty: none."""
    own_heads: Share | None = None
    """Query heads of the checkpoint that these are; None: all."""
    head_order: tuple[int, ...] = ()
    """Where the heads of q, then of k, then of v are among those that the projection computes.

    Empty: in this order.
    """
    window: int | None = None
    """Number of positions, its own included, that a token attends to; None: full attention."""
    num_sink_tokens: int = 0
    """First positions that stay visible in addition to the window."""
    q_norm: NormSpec | None = None
    """Norm of the queries before the rotation: of each head, or by its size of all together."""
    k_norm: NormSpec | None = None

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    def caches(self) -> tuple[LayerCache, ...]:
        vectors = CachedVectors(self.num_kv_heads, self.head_dim)
        return (LayerCache(Blocks(self.window, self.num_sink_tokens), (vectors, vectors)),)

    def tensors(self) -> Mapping[str, NormSpec | TensorSpec]:
        found: dict[str, NormSpec | TensorSpec] = {}
        if self.q_norm is not None:
            found[Q_NORM] = self.q_norm
        if self.k_norm is not None:
            found[K_NORM] = self.k_norm
        if self.sink_logits:
            own = self.own_heads or Share(OutputSpan(0, self.num_heads), self.num_heads)
            found[SINK_LOGITS] = TensorSpec(self.sink_logits, (own.whole,), (own.span,))
        return found

    def ropes(self) -> Mapping[RopeConfig, int]:
        ropes = (self.rope, self.query_rope)
        return {rope: self.head_dim for rope in ropes if rope is not None}

    def divisors(self) -> Sequence[Divided]:
        queries = Divided(f"{self.num_heads} query heads", self.num_heads)
        norm, num_kv = self.k_norm, self.num_kv_heads
        if norm is None or norm.size == self.head_dim:
            return queries, Divided(f"{num_kv} KV heads", num_kv, has_copies=True)
        # Ranks gather all heads for the norm, so none may be there twice.
        together = f"a norm of the {num_kv} key heads of a token together ({norm.path})"
        return queries, Divided(together, num_kv)

    def shard(self, place: TensorShard) -> tuple["AttentionSpec", Mapping[str, Split]]:
        heads = _Heads.of(self, place)
        order, positions = _head_positions(self, heads)
        queries = Share(heads.query, self.num_heads)
        own = dataclasses.replace(
            self,
            num_heads=heads.query.size,
            num_kv_heads=heads.kv.size,
            head_order=order,
            own_heads=queries,
            alibi_slopes=self.alibi_slopes[heads.query.first : heads.query.end],
            q_norm=_head_norm(self.q_norm, self, queries),
            k_norm=_head_norm(self.k_norm, self, Share(heads.kv, self.num_kv_heads)),
        )
        outputs = _scaled(positions, self.head_dim)
        inputs = _times(heads.query, self.head_dim)
        return own, {QKV: Split(outputs=outputs), OUTPUT: Split(inputs=inputs)}

    def step_bytes(self, itemsize: int) -> int:
        return (self.q_size + 2 * self.kv_size) * itemsize


class _Heads(NamedTuple):
    """Heads of a layer that a rank has."""

    query: OutputSpan
    kv: OutputSpan

    @classmethod
    def of(cls, attention: AttentionSpec, place: TensorShard) -> "_Heads":
        num_kv = attention.num_kv_heads
        kv = share_of(num_kv, *place)
        if num_kv < place.size:
            # Ranks with query heads of one KV head have a copy each.
            first = place.rank * num_kv // place.size
            kv = OutputSpan(first, first + 1)
        return cls(share_of(attention.num_heads, *place), kv)


def _head_positions(
    attention: AttentionSpec, heads: _Heads
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the rank's AttentionSpec.head_order, and its heads among those that are computed."""
    first_key, num_kv = attention.num_heads, attention.num_kv_heads
    order = attention.head_order or tuple(range(first_key + 2 * num_kv))
    own = (
        *order[heads.query.first : heads.query.end],
        *order[first_key + heads.kv.first : first_key + heads.kv.end],
        *order[first_key + num_kv + heads.kv.first : first_key + num_kv + heads.kv.end],
    )
    positions = tuple(sorted(own))
    return tuple(map(positions.index, own)) if attention.head_order else (), positions


def _scaled(positions: Sequence[int], head_dim: int) -> list[OutputSpan]:
    """Return the outputs of heads at these positions; neighbours are one span."""
    spans: list[OutputSpan] = []
    for position in positions:
        if spans and spans[-1].end == position * head_dim:
            spans[-1] = OutputSpan(spans[-1].first, (position + 1) * head_dim)
        else:
            spans.append(_times(OutputSpan(position, position + 1), head_dim))
    return spans


def _times(span: OutputSpan, factor: int) -> OutputSpan:
    return OutputSpan(span.first * factor, span.end * factor)


def _head_norm(norm: NormSpec | None, attention: AttentionSpec, heads: Share) -> NormSpec | None:
    """Return the norm of a rank's heads; one of all heads together stays whole."""
    if norm is None:
        return None
    if norm.num_heads is not None:
        return dataclasses.replace(norm, num_heads=heads.span.size, own_heads=heads)
    return norm if norm.size == attention.head_dim else dataclasses.replace(norm, own_heads=heads)
