"""Self-attention: its values, and what they mean for caches, weights and ranks."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from loraplex.core.cache import Blocks, CachedVectors, Chunk
from loraplex.models.linear_group import OutputSpan, Share, TensorShard, share_of, share_or_copy
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
POSITION_BIAS: Final = "position_bias"


class PositionBias(NamedTuple):
    """Numbers that are added to scores by the distance of key and query, in buckets (T5)."""

    tensor: str
    """Full name of a tensor [num_buckets, num_heads]. Layers may share it."""
    num_buckets: int
    max_distance: int
    """Distance from which all are in the last bucket."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec(MixerSpec):
    """Self-attention of one layer."""

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
    chunk: int | None = None
    """Size of chunks, from multiples of it on, within which tokens attend; then there is no window.

    None: there are none.
    """
    num_sink_tokens: int = 0
    """First positions that stay visible in addition to the window."""
    is_causal: bool = True
    """Whether a token sees no later one. Else a step computes the whole text, and the window is on
    both sides of a token."""
    q_norm: NormSpec | None = None
    """Norm of the queries before the rotation: of each head, or by its size of all together."""
    k_norm: NormSpec | None = None
    normalizes_after_rotation: bool = False
    """Whether these norms follow the rotation instead. Then there is no output gate."""
    output_gate: bool = False
    """Whether q's projection has, after each head, a gate: its sigmoid multiplies the output.

    Needs norms of the heads, and no other order of them.
    """
    position_bias: PositionBias | None = None
    kv_distance: int = 0
    """MixerSpec.kv_distance"""
    has_value_projection: bool = True
    """Whether values have a projection; else they are the keys' before their norm."""
    normalizes_values: bool = False
    """Whether values have a norm of each head, like the keys', but without weights."""

    @property
    def num_kv_projections(self) -> int:
        """Return how many of keys and values have a projection."""
        return 0 if self.kv_distance else 1 + self.has_value_projection

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def q_outputs(self) -> int:
        """Return the number of outputs of q's projection."""
        return self.q_size * self.vectors_per_query

    @property
    def vectors_per_query(self) -> int:
        return 2 if self.output_gate else 1

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def cache(self) -> LayerCache:
        """Return what it reads, also if another layer keeps it."""
        vectors = CachedVectors(self.num_kv_heads, self.head_dim)
        kept = (
            Blocks(self.window, self.num_sink_tokens) if self.chunk is None else Chunk(self.chunk)
        )
        return LayerCache(kept, (vectors, vectors))

    def caches(self) -> tuple[LayerCache, ...]:
        return () if self.kv_distance else (self.cache,)

    def tensors(self) -> Mapping[str, NormSpec | TensorSpec]:
        found: dict[str, NormSpec | TensorSpec] = {}
        if self.q_norm is not None:
            found[Q_NORM] = self.q_norm
        if self.k_norm is not None:
            found[K_NORM] = self.k_norm
        if self.sink_logits:
            own = self.own_heads or Share(OutputSpan(0, self.num_heads), self.num_heads)
            found[SINK_LOGITS] = TensorSpec(self.sink_logits, (own.whole,), (own.span,))
        if self.position_bias is not None:
            num_heads = self.num_heads if self.own_heads is None else self.own_heads.whole
            bias = self.position_bias
            found[POSITION_BIAS] = TensorSpec(bias.tensor, (bias.num_buckets, num_heads))
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
        inputs = heads.query.times(self.head_dim)
        return own, {QKV: Split(outputs=outputs), OUTPUT: Split(inputs=inputs)}

    def step_bytes(self, itemsize: int) -> int:
        return (self.q_outputs + self.num_kv_projections * self.kv_size) * itemsize


class _Heads(NamedTuple):
    """Heads of a layer that a rank has."""

    query: OutputSpan
    kv: OutputSpan

    @classmethod
    def of(cls, attention: AttentionSpec, place: TensorShard) -> "_Heads":
        # Ranks with query heads of one KV head have a copy each.
        kv = share_or_copy(attention.num_kv_heads, *place)
        return cls(share_of(attention.num_heads, *place), kv)


def _head_positions(
    attention: AttentionSpec, heads: _Heads
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the rank's AttentionSpec.head_order, and its heads among those that are computed."""
    vectors, num_kv = attention.vectors_per_query, attention.num_kv_heads
    first_key = attention.num_heads * vectors
    firsts = [first_key + part * num_kv for part in range(attention.num_kv_projections)]
    order = attention.head_order or tuple(range(first_key + len(firsts) * num_kv))
    own = (
        *order[heads.query.first * vectors : heads.query.end * vectors],
        *(head for first in firsts for head in order[first + heads.kv.first :][: heads.kv.size]),
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
            spans.append(OutputSpan(position, position + 1).times(head_dim))
    return spans


def _head_norm(norm: NormSpec | None, attention: AttentionSpec, heads: Share) -> NormSpec | None:
    """Return the norm of a rank's heads; one of all heads together stays whole."""
    if norm is None:
        return None
    if norm.num_heads is not None:
        return dataclasses.replace(norm, num_heads=heads.span.size, own_heads=heads)
    return norm if norm.size == attention.head_dim else dataclasses.replace(norm, own_heads=heads)
