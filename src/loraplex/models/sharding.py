"""Part of a model that one rank of several computes: heads, inner units and logits. Free of torch.

A part is a `ModelSpec` of its own, of a smaller model, whose linear layers remember which slices of
the checkpoint they are. So KV cache, adapter pool, sizes and packing follow from it (ADR 34).
"""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import NamedTuple

from loraplex.core.errors import ConfigError
from loraplex.core.plan import AdapterShare
from loraplex.models.linear_group import LinearGroup, Share, Span, share_of
from loraplex.models.spec import (
    DOWN,
    OUTPUT,
    QKV,
    SHARED_DOWN,
    SHARED_UP,
    UP,
    AttentionSpec,
    LayerSpec,
    ModelSpec,
    NormSpec,
)


class TensorShard(NamedTuple):
    """Place of a rank among those that share every layer."""

    rank: int = 0
    size: int = 1


WHOLE = TensorShard()


def shard(spec: ModelSpec, place: TensorShard) -> ModelSpec:
    """Return what this rank computes. Raises ConfigError if the model cannot be divided so."""
    if place.size == 1:
        return spec
    return dataclasses.replace(
        spec,
        layers=tuple(_layer(layer, place, spec) for layer in spec.layers),
        own_logits=share_of(spec.vocab_size, *place),
        shard_of=spec,
    )


def adapter_share(spec: ModelSpec, largest_piece: int) -> AdapterShare | None:
    """Return what of an adapter a rank with this spec holds; None: all.

    largest_piece: elements of the largest piece that staging makes of a vector.
    """
    if spec.shard_of is None:
        return None
    return AdapterShare(tuple(dict(shapes) for shapes in spec.module_shapes), largest_piece)


class _Heads(NamedTuple):
    """Heads of a layer that a rank has."""

    query: Span
    kv: Span

    @classmethod
    def of(cls, attention: AttentionSpec, place: TensorShard) -> "_Heads":
        num_kv = attention.num_kv_heads
        kv = share_of(num_kv, *place)
        if num_kv < place.size:
            # Ranks with query heads of one KV head have a copy each.
            first = place.rank * num_kv // place.size
            kv = Span(first, first + 1)
        return cls(share_of(attention.num_heads, *place), kv)


def _layer(layer: LayerSpec, place: TensorShard, spec: ModelSpec) -> LayerSpec:
    attention, feed_forward = layer.attention, layer.feed_forward
    _check_heads(attention, place, spec)
    heads = _Heads.of(attention, place)
    order, positions = _head_positions(attention, heads)
    linears = dict(layer.linears)
    linears[QKV] = linears[QKV].split(outputs=_scaled(positions, attention.head_dim))
    linears[OUTPUT] = linears[OUTPUT].split(inputs=_times(heads.query, attention.head_dim))
    inner: dict[str, Span] = {}
    for up, down in ((UP, DOWN), (SHARED_UP, SHARED_DOWN)):
        if up in linears:
            inner[up] = _inner(linears[down], place, spec)
            linears[up] = linears[up].split(outputs=_inner_outputs(linears[up], inner[up], layer))
            linears[down] = linears[down].split(inputs=inner[up])
    return dataclasses.replace(
        layer,
        attention=dataclasses.replace(
            attention,
            num_heads=heads.query.size,
            num_kv_heads=heads.kv.size,
            head_order=order,
            own_heads=Share(heads.query, attention.num_heads),
            alibi_slopes=attention.alibi_slopes[heads.query.first : heads.query.end],
            q_norm=_head_norm(attention.q_norm, attention, Share(heads.query, attention.num_heads)),
            k_norm=_head_norm(attention.k_norm, attention, Share(heads.kv, attention.num_kv_heads)),
        ),
        feed_forward=dataclasses.replace(feed_forward, inner_size=inner[UP].size),
        linears=linears,
    )


def _check_heads(attention: AttentionSpec, place: TensorShard, spec: ModelSpec) -> None:
    num_heads, num_kv, size = attention.num_heads, attention.num_kv_heads, place.size
    if num_heads % size:
        raise _indivisible(spec, place, f"{num_heads} query heads")
    if num_kv % size and size % num_kv:
        raise _indivisible(spec, place, f"{num_kv} KV heads")
    key_norm = attention.k_norm
    if key_norm is not None and key_norm.size != attention.head_dim and num_kv % size:
        raise ConfigError(
            f"{spec.architecture} normalises the {num_kv} key heads of a token together "
            f"({key_norm.path}), so ranks cannot have copies of one: tensor_parallel_size must "
            f"be a divisor of {num_kv}, got {size}",
            param="tensor_parallel_size",
        )


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


def _scaled(positions: Sequence[int], head_dim: int) -> list[Span]:
    """Return the outputs of heads at these positions; neighbours are one span."""
    spans: list[Span] = []
    for position in positions:
        if spans and spans[-1].end == position * head_dim:
            spans[-1] = Span(spans[-1].first, (position + 1) * head_dim)
        else:
            spans.append(_times(Span(position, position + 1), head_dim))
    return spans


def _times(span: Span, factor: int) -> Span:
    return Span(span.first * factor, span.end * factor)


def _inner(down: LinearGroup, place: TensorShard, spec: ModelSpec) -> Span:
    if down.in_features % place.size:
        raise _indivisible(spec, place, f"an inner size of {down.in_features}")
    return share_of(down.in_features, *place)


def _inner_outputs(up: LinearGroup, inner: Span, layer: LayerSpec) -> list[Span]:
    """Return the outputs of `up` that belong to these inner units: with a gate, twice as many."""
    total = sum(up.outputs.values())
    size = total // (1 + layer.feed_forward.is_gated)
    return [Span(first + inner.first, first + inner.end) for first in range(0, total, size)]


def _head_norm(norm: NormSpec | None, attention: AttentionSpec, heads: Share) -> NormSpec | None:
    """Return the norm of a rank's heads; one of all heads together stays whole."""
    if norm is None:
        return None
    if norm.num_heads is not None:
        return dataclasses.replace(norm, num_heads=heads.span.size, own_heads=heads)
    return norm if norm.size == attention.head_dim else dataclasses.replace(norm, own_heads=heads)


def _indivisible(spec: ModelSpec, place: TensorShard, what: str) -> ConfigError:
    sizes = [size for size in range(1, 65) if _divides(spec, size)]
    return ConfigError(
        f"{spec.architecture} has layers with {what}, which {place.size} ranks cannot share "
        f"equally: tensor_parallel_size must be one of {', '.join(map(str, sizes))}",
        param="tensor_parallel_size",
    )


def _divides(spec: ModelSpec, size: int) -> bool:
    inner = itertools.chain.from_iterable(
        (layer.linears[name].in_features for name in (DOWN, SHARED_DOWN) if name in layer.linears)
        for layer in spec.layers
    )
    return all(units % size == 0 for units in inner) and all(
        layer.attention.num_heads % size == 0
        and (layer.attention.num_kv_heads % size == 0 or size % layer.attention.num_kv_heads == 0)
        for layer in spec.layers
    )
