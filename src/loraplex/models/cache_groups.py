"""The cache groups of a model: its layers by what they keep, and for how long."""

import dataclasses
import math
from collections.abc import Sequence

import torch

from loraplex.core.cache import Blocks, CachedFloats, CacheSpec, Cross, StorageSpec
from loraplex.core.errors import ConfigError
from loraplex.kernels.ops import stored_size
from loraplex.models.spec import ModelSpec
from loraplex.models.specs.attention import AttentionSpec
from loraplex.models.specs.part import LayerCache


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LayerGroup:
    """Layers with blocks of one form and one lifetime: they share a block table per sequence.

    All groups have the same number of tokens per block.
    """

    layers: tuple[int, ...]
    spec: CacheSpec
    """A window or chunk that no sequence outgrows is none."""
    storage: StorageSpec
    caches: tuple[LayerCache, ...] = ()
    """What mixers call it (MixerSpec.caches): with their own windows."""


def cache_groups(spec: ModelSpec, max_model_len: int) -> tuple[LayerGroup, ...]:
    """Return the cache groups of the layers, the greatest reach first; to read all is the greatest.

    The encoder's positions come last: the prefix cache counts in blocks of the first group.
    Every stage of a pipeline has the groups of all stages, some of them without layers of its own.
    """
    members: dict[LayerCache, list[int]] = {}
    names: dict[LayerCache, dict[LayerCache, None]] = {}
    for index, layer in enumerate(spec.all_layers.layers, -spec.first_layer):
        for mixer in layer.mixers:
            for own in mixer.caches():
                cache = own
                is_of_encoder = isinstance(cache.spec, Cross)
                if not is_of_encoder and _reach(cache.spec, max_model_len) >= max_model_len:
                    cache = cache._replace(spec=_unlimited(cache.spec))
                members.setdefault(cache, []).append(index)
                names.setdefault(cache, {})[own] = None
    groups = [
        LayerGroup(
            layers=tuple(layer for layer in layers if 0 <= layer < spec.num_layers),
            spec=cache.spec,
            storage=cache.storage,
            caches=tuple(names[cache]),
        )
        for cache, layers in members.items()
    ]

    def order(group: LayerGroup) -> tuple[bool, int]:
        return isinstance(group.spec, Cross), -_reach(group.spec, max_model_len)

    return tuple(sorted(groups, key=order))


def _unlimited(spec: CacheSpec) -> Blocks:
    return Blocks(by_rows=isinstance(spec, Blocks) and spec.by_rows)


def _reach(spec: CacheSpec, max_model_len: int) -> int:
    return max_model_len if spec.reach is None else spec.reach


def storage_bytes(storage: StorageSpec, block_size: int, dtype: torch.dtype) -> int:
    """Return the bytes of one block in one layer. dtype: of the KV cache."""
    total = 0
    for tensor in storage:
        if isinstance(tensor, CachedFloats):
            positions = block_size if tensor.is_per_position else 1
            total += math.prod(tensor.shape) * positions * torch.float32.itemsize
        else:
            vector_bytes = stored_size(tensor.size, dtype) * dtype.itemsize
            total += tensor.num_heads * block_size * vector_bytes
    return total


def attention_chunks(spec: ModelSpec) -> frozenset[int]:
    """Return the sizes of the chunks within which layers attend; empty: none has such."""
    chunks = (attention.chunk for attention in spec.mixers_of(AttentionSpec))
    return frozenset(chunk for chunk in chunks if chunk is not None)


def with_attention_windows(
    spec: ModelSpec, max_windows: Sequence[int], num_sink_tokens: int
) -> ModelSpec:
    """Limit layer i to a window of max_windows[i % len] positions and the sink tokens.

    max_windows may be empty. A layer's own window stays where it is smaller. Raises ConfigError for
    layers whose attention is in chunks.
    """
    limits: Sequence[int | None] = max_windows or (None,)

    def limited(attention: AttentionSpec, layer: int) -> AttentionSpec:
        # A layer that reads what another one keeps has the limit of that one.
        limit = limits[(layer - attention.kv_distance) % len(limits)]
        if attention.chunk is not None and (limit or num_sink_tokens):
            raise ConfigError(
                f"a window of {limit or 'any'} positions with {num_sink_tokens} sink tokens is not "
                f"supported in layer {layer}: its attention is in chunks of {attention.chunk} "
                "positions",
                param="max_attention_window_size" if limit else "sink_token_length",
            )
        window = _smaller(attention.window, limit)
        return dataclasses.replace(attention, window=window, num_sink_tokens=num_sink_tokens)

    return spec.map_mixers(AttentionSpec, limited)


def _smaller(window: int | None, limit: int | None) -> int | None:
    if window is None or limit is None:
        return window or limit
    return min(window, limit)
