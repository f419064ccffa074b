"""Caps, windows and the host: how many blocks there are."""

from typing import Any

import pytest
import torch

from loraplex.core.errors import ConfigError
from loraplex.core.plan import KVGroupCapacity
from loraplex.execution.sizing.kv import KVSize, block_bytes, size_kv, windowed
from loraplex.execution.sizing.settings import RunnerSettings
from loraplex.models.attention import attention_shapes
from loraplex.models.spec import ModelSpec
from support.tiny_decoder import tiny_spec

CONFIG = tiny_spec(
    "Qwen2ForCausalLM",
    num_hidden_layers=4,
    max_position_embeddings=1000,
    use_sliding_window=True,
    sliding_window=50,
    layer_types=["full_attention", "sliding_attention"] * 2,
)
BLOCK_BYTES = block_bytes(attention_shapes(CONFIG, 16), torch.float32)


def layer_windows(spec: ModelSpec) -> tuple[int | None, ...]:
    return tuple(layer.attention.window for layer in spec.layers)


def kv(**changes: Any) -> KVSize:
    settings = RunnerSettings(**changes)
    return size_kv(settings, windowed(settings, CONFIG), torch.float32)


def blocks(**changes: Any) -> tuple[int, ...]:
    """Return the number of blocks of each KV group."""
    return tuple(capacity.num_blocks for capacity in kv(**changes).capacities)


def test_the_smaller_of_bytes_and_tokens() -> None:
    assert blocks(kv_cache_bytes=70 * BLOCK_BYTES, max_tokens_in_paged_kv_cache=1009) == (64,)
    assert blocks(kv_cache_bytes=70 * BLOCK_BYTES, max_tokens_in_paged_kv_cache=9999) == (70,)


def test_tokens_alone_say_the_size() -> None:
    assert blocks(max_tokens_in_paged_kv_cache=160_000) == (10_000,)


def test_a_cap_that_is_too_small_is_named() -> None:
    with pytest.raises(ConfigError, match="max_tokens_in_paged_kv_cache to at least 512") as caught:
        kv(max_tokens_in_paged_kv_cache=100, max_model_len=500)
    assert caught.value.param == "max_tokens_in_paged_kv_cache"
    assert blocks(max_tokens_in_paged_kv_cache=512, max_model_len=500) == (32,)
    size = kv(max_tokens_in_paged_kv_cache=100)
    assert (size.max_model_len, size.capacities) == (112, (KVGroupCapacity(num_blocks=7),))


def test_host_blocks() -> None:
    assert [group.num_host_blocks for group in kv().capacities] == [0]
    size = kv(kv_cache_host_memory_bytes=5 * BLOCK_BYTES + 1)
    assert [group.num_host_blocks for group in size.capacities] == [5]
    with pytest.raises(ConfigError, match=f"does not hold one block of {BLOCK_BYTES} bytes"):
        kv(kv_cache_host_memory_bytes=BLOCK_BYTES - 1)


def test_windows_are_by_layer_and_repeat() -> None:
    settings = RunnerSettings(max_attention_window_size=(100, 20), sink_token_length=4)
    config = windowed(settings, CONFIG)
    assert layer_windows(config) == (100, 20, 100, 20)
    assert {layer.attention.num_sink_tokens for layer in config.layers} == {4}
    settings = RunnerSettings(max_attention_window_size=(80,))
    assert layer_windows(windowed(settings, CONFIG)) == (80, 50, 80, 50)
    assert windowed(RunnerSettings(), CONFIG) == CONFIG


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"max_attention_window_size": (8, 0)}, "at least 1 in every layer"),
        ({"max_attention_window_size": (8,) * 5}, "has 5 entries, the model 4 layers"),
    ],
)
def test_windows_that_cannot_be(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        windowed(RunnerSettings(**changes), CONFIG)


def test_sinks_need_a_window() -> None:
    full = tiny_spec(num_hidden_layers=4)
    with pytest.raises(ConfigError, match="sink_token_length 3 needs a window"):
        windowed(RunnerSettings(sink_token_length=3), full)


def test_a_window_bounds_what_a_sequence_needs() -> None:
    changes = {"max_attention_window_size": (64,), "max_num_batched_tokens": 32}
    size = kv(**changes, num_blocks=8, max_model_len=1000)
    expected = KVGroupCapacity(num_blocks=8, attention_window=64)
    assert (size.max_model_len, size.capacities) == (1000, (expected,))
    with pytest.raises(ConfigError, match=f"kv_cache_bytes to at least {7 * BLOCK_BYTES}"):
        kv(**changes, num_blocks=6, max_model_len=1000)
    size = kv(**changes, num_blocks=4)
    assert (size.max_model_len, size.capacities) == (64, (KVGroupCapacity(num_blocks=4),))


def test_a_window_that_no_sequence_outgrows_is_none() -> None:
    for max_model_len, window in ((500, None), (501, 500)):
        size = kv(max_attention_window_size=(500,), max_model_len=max_model_len)
        assert size.capacities[0].attention_window == window
