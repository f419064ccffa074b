"""The KV groups of a model: its layers by the shape and the lifetime of their KV blocks."""

import dataclasses
import itertools
from collections.abc import Sequence

from loraplex.models.spec import ModelSpec


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KVGroup:
    """Layers with KV blocks of one shape and one lifetime: they share a block table per sequence.

    All groups have the same number of tokens per block.
    """

    layers: tuple[int, ...]
    num_kv_heads: int
    head_dim: int
    window: int | None
    """AttentionSpec.window; None also for a window that no sequence outgrows."""
    num_sink_tokens: int
    """AttentionSpec.num_sink_tokens; 0 without a window."""


def kv_groups(spec: ModelSpec, max_model_len: int) -> tuple[KVGroup, ...]:
    """Return the KV groups of the layers, the largest window first; no window is the largest.

    Every stage of a pipeline has the groups of all stages, some of them without layers of its own.
    """
    members: dict[tuple[int, int, int | None, int], list[int]] = {}
    for index, layer in enumerate(spec.all_layers.layers, -spec.first_layer):
        attention = layer.attention
        window, num_sink_tokens = attention.window, attention.num_sink_tokens
        if window is None or window >= max_model_len:
            window, num_sink_tokens = None, 0
        key = (attention.num_kv_heads, attention.head_dim, window, num_sink_tokens)
        members.setdefault(key, []).append(index)
    groups = [
        KVGroup(
            layers=tuple(layer for layer in layers if 0 <= layer < spec.num_layers),
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            window=window,
            num_sink_tokens=num_sink_tokens,
        )
        for (num_kv_heads, head_dim, window, num_sink_tokens), layers in members.items()
    ]
    return tuple(sorted(groups, key=lambda group: -(group.window or max_model_len)))


def with_attention_windows(
    spec: ModelSpec, max_windows: Sequence[int], num_sink_tokens: int
) -> ModelSpec:
    """Limit layer i to a window of max_windows[i % len] positions and the sink tokens.

    max_windows may be empty. A layer's own window stays where it is smaller.
    """
    limits: Sequence[int | None] = max_windows or (None,)
    layers = tuple(
        dataclasses.replace(
            layer,
            attention=dataclasses.replace(
                layer.attention,
                window=_smaller(layer.attention.window, limit),
                num_sink_tokens=num_sink_tokens,
            ),
        )
        for layer, limit in zip(spec.layers, itertools.cycle(limits), strict=False)
    )
    return dataclasses.replace(spec, layers=layers)


def _smaller(window: int | None, limit: int | None) -> int | None:
    if window is None or limit is None:
        return window or limit
    return min(window, limit)
