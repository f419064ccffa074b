"""Layers that share a block table."""

import dataclasses

from loraplex.models.kv_groups import KVGroup, kv_groups, with_attention_windows
from loraplex.models.spec import ModelSpec
from support.tiny_decoder import tiny_spec

SPEC = tiny_spec(num_hidden_layers=4)


def windows(spec: ModelSpec, max_model_len: int) -> list[tuple[int | None, tuple[int, ...]]]:
    """Return the window and the layers of each group."""
    return [(group.window, group.layers) for group in kv_groups(spec, max_model_len)]


def test_equal_layers_are_one_group() -> None:
    everything = KVGroup(
        layers=(0, 1, 2, 3), num_kv_heads=2, head_dim=8, window=None, num_sink_tokens=0
    )
    assert kv_groups(SPEC, 100) == (everything,)


def test_the_largest_window_is_first() -> None:
    spec = with_attention_windows(SPEC, (20, 30, 20, 40), 4)
    assert windows(spec, 100) == [(40, (3,)), (30, (1,)), (20, (0, 2))]
    assert {group.num_sink_tokens for group in kv_groups(spec, 100)} == {4}


def test_a_window_that_no_sequence_outgrows_is_none() -> None:
    spec = with_attention_windows(SPEC, (20, 30, 20, 40), 4)
    assert windows(spec, 30) == [(None, (1, 3)), (20, (0, 2))]
    first, second = kv_groups(spec, 30)
    assert (first.num_sink_tokens, second.num_sink_tokens) == (0, 4)
    assert windows(spec, 20) == [(None, (0, 1, 2, 3))]


def test_layers_with_other_heads_are_another_group() -> None:
    wide = dataclasses.replace(SPEC.layers[1].attention, num_kv_heads=4)
    layer = dataclasses.replace(SPEC.layers[1], attention=wide)
    spec = dataclasses.replace(SPEC, layers=(SPEC.layers[0], layer, *SPEC.layers[2:]))
    assert windows(spec, 100) == [(None, (0, 2, 3)), (None, (1,))]
    assert [group.num_kv_heads for group in kv_groups(spec, 100)] == [2, 4]
