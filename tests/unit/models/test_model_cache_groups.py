"""Layers that share a block table."""

import dataclasses
from typing import Any

from loraplex.core.cache import Blocks, CachedVectors, CacheSpec, Chunk, States
from loraplex.models.cache_groups import LayerGroup, cache_groups, with_attention_windows
from loraplex.models.spec import ModelSpec
from loraplex.models.specs.attention import AttentionSpec
from loraplex.models.specs.part import LayerCache
from support.tiny_decoder import tiny_spec

SPEC = tiny_spec(num_hidden_layers=4)


def windows(spec: ModelSpec, max_model_len: int) -> list[tuple[int | None, tuple[int, ...]]]:
    """Return the window and the layers of each group."""
    return [(group.spec.window, group.layers) for group in cache_groups(spec, max_model_len)]


def test_equal_layers_are_one_group() -> None:
    storage = (CachedVectors(2, 8), CachedVectors(2, 8))
    everything = LayerGroup(
        layers=(0, 1, 2, 3),
        spec=Blocks(),
        storage=storage,
        caches=(LayerCache(Blocks(), storage),),
    )
    assert cache_groups(SPEC, 100) == (everything,)


def test_a_group_knows_what_its_layers_call_it() -> None:
    """Windows that no sequence outgrows stay those of the mixers."""
    spec = with_attention_windows(SPEC, (20, 30, 20, 40), 0)
    first, second = cache_groups(spec, 30)
    assert [cache.spec for cache in first.caches] == [Blocks(30), Blocks(40)]
    assert [cache.spec for cache in second.caches] == [Blocks(20)]


def test_the_largest_window_is_first() -> None:
    spec = with_attention_windows(SPEC, (20, 30, 20, 40), 4)
    assert windows(spec, 100) == [(40, (3,)), (30, (1,)), (20, (0, 2))]
    assert {group.spec.sinks for group in cache_groups(spec, 100)} == {4}


def test_a_window_that_no_sequence_outgrows_is_none() -> None:
    spec = with_attention_windows(SPEC, (20, 30, 20, 40), 4)
    assert windows(spec, 30) == [(None, (1, 3)), (20, (0, 2))]
    first, second = cache_groups(spec, 30)
    assert (first.spec.sinks, second.spec.sinks) == (0, 4)
    assert windows(spec, 20) == [(None, (0, 1, 2, 3))]


def test_layers_with_other_heads_are_another_group() -> None:
    wide = dataclasses.replace(SPEC.layers[1].mixer, num_kv_heads=4)
    layer = dataclasses.replace(SPEC.layers[1], mixer=wide)
    spec = dataclasses.replace(SPEC, layers=(SPEC.layers[0], layer, *SPEC.layers[2:]))
    assert windows(spec, 100) == [(None, (0, 2, 3)), (None, (1,))]
    assert [group.storage[0].num_heads for group in cache_groups(spec, 100)] == [2, 4]


def test_a_layer_that_reads_what_another_keeps_has_no_storage_and_its_limit() -> None:
    """A smaller window of its own would be one of another group."""
    reader = dataclasses.replace(SPEC.layers[3].mixer, kv_distance=2)
    layer = dataclasses.replace(SPEC.layers[3], mixer=reader)
    spec = dataclasses.replace(SPEC, layers=(*SPEC.layers[:3], layer))
    spec = with_attention_windows(spec, (40, 20, 30, 10), 4)
    assert windows(spec, 100) == [(40, (0,)), (30, (2,)), (20, (1,))]
    (source,) = spec.layers[1].mixer.caches()
    assert spec.layers[3].mixer.cache == source


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Keeping(AttentionSpec):
    """Attention that keeps what it is given."""

    kept: CacheSpec

    def caches(self) -> tuple[LayerCache, ...]:
        return tuple(cache._replace(spec=self.kept) for cache in super().caches())


def _fields(mixer: AttentionSpec) -> dict[str, Any]:
    return {field.name: getattr(mixer, field.name) for field in dataclasses.fields(mixer)}


def test_a_kind_that_reads_few_positions_stays_what_it_is() -> None:
    """States are read by no position, which is not the same as by all."""
    kinds = (States(every=16), Blocks(), Chunk(size=32, before=3), Chunk(size=64))
    layers = tuple(
        dataclasses.replace(layer, mixer=_Keeping(**_fields(layer.mixer), kept=kind))
        for layer, kind in zip(SPEC.layers, kinds, strict=True)
    )
    groups = cache_groups(dataclasses.replace(SPEC, layers=layers), 64)
    assert [(group.spec, group.layers) for group in groups] == [
        (Blocks(), (1, 3)),
        (kinds[2], (2,)),
        (kinds[0], (0,)),
    ]
