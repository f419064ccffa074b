"""Caps, windows and the host: how many blocks there are."""

import dataclasses
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from loraplex.core.byte_sizes import enough_bytes
from loraplex.core.cache import Blocks, CachedFloats, Chunk, Cross, States
from loraplex.core.errors import ConfigError
from loraplex.core.plan import CacheGroupCapacity
from loraplex.execution.sizing.capacity import describe_memory, size_memory
from loraplex.execution.sizing.kv import KVSize, block_bytes, size_kv, trial_kv_size, windowed
from loraplex.execution.sizing.settings import RunnerSettings
from loraplex.memory.cache_policy import cache_policy
from loraplex.models.cache_groups import cache_groups
from loraplex.models.spec import EncoderSpec, ModelSpec
from loraplex.models.specs.part import LayerCache
from loraplex.models.stages import PipelineStage, stage
from support.naming import naming
from support.tiny_decoder import tiny_spec
from support.toy_encoder import encoder_decoder_spec
from support.toy_recurrence import RecurrenceSpec, with_recurrence

CONFIG = tiny_spec(
    "Qwen2ForCausalLM",
    num_hidden_layers=4,
    max_position_embeddings=1000,
    use_sliding_window=True,
    sliding_window=50,
    layer_types=["full_attention", "sliding_attention"] * 2,
)
"""Two cache groups of two layers each: without a window, and with one of 50."""
ONE_GROUP = tiny_spec("Qwen2ForCausalLM", num_hidden_layers=4, max_position_embeddings=1000)
BLOCK_BYTES = block_bytes(CONFIG, 16, torch.float32)


def layer_windows(spec: ModelSpec) -> tuple[int | None, ...]:
    return tuple(layer.mixer.window for layer in spec.layers)


def kv(spec: ModelSpec = ONE_GROUP, **changes: Any) -> KVSize:
    settings = RunnerSettings(**changes)
    return size_kv(settings, windowed(settings, spec), torch.float32)


def group(num_blocks: int, window: int | None = None) -> CacheGroupCapacity:
    """Return the capacity of a group of all layers."""
    return CacheGroupCapacity(spec=Blocks(window), num_blocks=num_blocks, block_bytes=BLOCK_BYTES)


def blocks(spec: ModelSpec = ONE_GROUP, **changes: Any) -> tuple[int, ...]:
    """Return the number of blocks of each cache group."""
    return tuple(capacity.num_blocks for capacity in kv(spec, **changes).capacities)


def test_the_smaller_of_bytes_and_tokens() -> None:
    assert blocks(kv_cache_bytes=70 * BLOCK_BYTES, max_tokens_in_paged_kv_cache=1009) == (64,)
    assert blocks(kv_cache_bytes=70 * BLOCK_BYTES, max_tokens_in_paged_kv_cache=9999) == (70,)


def test_tokens_alone_say_the_size() -> None:
    assert blocks(max_tokens_in_paged_kv_cache=160_000) == (10_000,)


def test_a_cap_that_is_too_small_is_named() -> None:
    with pytest.raises(ConfigError, match=naming("max_tokens_in_paged_kv_cache", 512)) as caught:
        kv(max_tokens_in_paged_kv_cache=100, max_model_len=500)
    assert caught.value.param == "max_tokens_in_paged_kv_cache"
    assert blocks(max_tokens_in_paged_kv_cache=512, max_model_len=500) == (32,)
    size = kv(max_tokens_in_paged_kv_cache=100)
    assert (size.max_model_len, size.capacities) == (112, (group(7),))


def test_host_blocks() -> None:
    assert [group.num_host_blocks for group in kv().capacities] == [0]
    size = kv(kv_cache_host_memory_bytes=5 * BLOCK_BYTES + 1)
    assert [group.num_host_blocks for group in size.capacities] == [5]
    with pytest.raises(ConfigError, match=naming(enough_bytes(BLOCK_BYTES), 0)):
        kv(kv_cache_host_memory_bytes=BLOCK_BYTES - 1)


def test_a_stage_without_caches_has_no_host_blocks_in_no_memory() -> None:
    first, *others = ONE_GROUP.layers
    without = dataclasses.replace(first, mixer=None, linears={}, norms={})
    whole = dataclasses.replace(ONE_GROUP, layers=(without, *others))
    part = stage(whole, PipelineStage(0, len(whole.layers)))
    assert part.layers == (without,)
    assert [group.num_host_blocks for group in kv(part).capacities] == [0]


def test_windows_are_by_layer_and_repeat() -> None:
    settings = RunnerSettings(max_attention_window_size=(100, 20), sink_token_length=4)
    config = windowed(settings, CONFIG)
    assert layer_windows(config) == (100, 20, 100, 20)
    assert {layer.mixer.num_sink_tokens for layer in config.layers} == {4}
    settings = RunnerSettings(max_attention_window_size=(80,))
    assert layer_windows(windowed(settings, CONFIG)) == (80, 50, 80, 50)
    assert windowed(RunnerSettings(), CONFIG) == CONFIG


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"max_attention_window_size": (8, 0)}, (1, "max_attention_window_size", "(8, 0)")),
        ({"max_attention_window_size": (8,) * 5}, (5, 4, "max_attention_window_size")),
    ],
)
def test_windows_that_cannot_be(changes: dict[str, Any], named: tuple[object, ...]) -> None:
    with pytest.raises(ConfigError, match=naming(*named)):
        windowed(RunnerSettings(**changes), CONFIG)


def test_sinks_need_a_window() -> None:
    full = tiny_spec(num_hidden_layers=4)
    with pytest.raises(ConfigError, match=naming("sink_token_length", 3)):
        windowed(RunnerSettings(sink_token_length=3), full)


def test_a_window_bounds_what_a_sequence_needs() -> None:
    changes = {"max_attention_window_size": (64,), "max_num_batched_tokens": 32}
    size = kv(**changes, num_blocks=8, max_model_len=1000)
    expected = group(8, 64)
    assert (size.max_model_len, size.capacities) == (1000, (expected,))
    with pytest.raises(ConfigError, match=naming("kv_cache_bytes", enough_bytes(7 * BLOCK_BYTES))):
        kv(**changes, num_blocks=6, max_model_len=1000)
    size = kv(**changes, num_blocks=4)
    assert (size.max_model_len, size.capacities) == (64, (group(4),))


def test_a_window_that_no_sequence_outgrows_is_none() -> None:
    for max_model_len, window in ((500, None), (501, 500)):
        size = kv(max_attention_window_size=(500,), max_model_len=max_model_len)
        assert size.capacities[0].spec.window == window


FEW: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 32}
"""Then a sequence needs at most 6 blocks for a window of 50, and all of them 24."""


def test_a_group_with_a_window_has_no_blocks_that_no_sequence_could_use() -> None:
    assert blocks(CONFIG, **FEW, kv_cache_bytes=20 * BLOCK_BYTES, max_model_len=300) == (20, 20)
    # What the second group leaves is the first one's.
    assert blocks(CONFIG, **FEW, kv_cache_bytes=100 * BLOCK_BYTES) == (176, 24)
    assert blocks(CONFIG, **FEW, num_blocks=100) == (100, 24)
    size = kv(CONFIG, **FEW, num_blocks=100)
    assert [group.block_bytes for group in size.capacities] == [BLOCK_BYTES // 2] * 2
    assert size.num_bytes == sum(group.num_blocks * group.block_bytes for group in size.capacities)
    assert blocks(CONFIG, **FEW, max_tokens_in_paged_kv_cache=1600) == (100, 24)
    assert blocks(CONFIG, **FEW) == (4 * 63, 24)


def test_host_blocks_are_divided_like_those_of_the_device() -> None:
    size = kv(CONFIG, **FEW, kv_cache_host_memory_bytes=30 * BLOCK_BYTES)
    assert [group.num_host_blocks for group in size.capacities] == [36, 24]


@given(
    windows=st.lists(st.integers(1, 1100), min_size=1, max_size=4),
    num_bytes=st.integers(100 * BLOCK_BYTES, 1000 * BLOCK_BYTES),
    max_num_seqs=st.integers(1, 40),
    num_sinks=st.integers(0, 40),
)
def test_no_group_has_less_than_an_equal_share_that_it_can_use(
    windows: list[int], num_bytes: int, max_num_seqs: int, num_sinks: int
) -> None:
    limits: dict[str, Any] = {
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max(32, max_num_seqs),
        "max_attention_window_size": tuple(windows),
        "sink_token_length": num_sinks,
    }
    size = kv(**limits, kv_cache_bytes=num_bytes)
    first = size.capacities[0].num_blocks
    more = kv(**limits, num_blocks=first + 1)
    assert size.num_bytes <= num_bytes < more.num_bytes
    for group, grown in zip(size.capacities, more.capacities, strict=True):
        assert group.num_blocks == first or group.num_blocks == grown.num_blocks
        held = cache_policy(group.spec, 16).max_held(1000, limits["max_num_batched_tokens"])
        assert group.num_blocks >= min(num_bytes // BLOCK_BYTES, max_num_seqs * held)


def test_too_few_bytes_for_one_sequence_in_every_group() -> None:
    needed = (63 + 24) * BLOCK_BYTES // 2
    with pytest.raises(ConfigError, match=naming("kv_cache_bytes", enough_bytes(needed))):
        kv(CONFIG, **FEW, kv_cache_bytes=needed - 1, max_model_len=1000)
    assert blocks(CONFIG, **FEW, kv_cache_bytes=needed, max_model_len=1000) == (63, 24)


def test_sequences_that_outgrow_no_window_have_one_group() -> None:
    """Also if they became shorter because the KV cache is small."""
    assert blocks(CONFIG, **FEW, max_model_len=50) == (4 * 4,)
    size = kv(CONFIG, **FEW, kv_cache_bytes=3 * BLOCK_BYTES)
    assert (size.max_model_len, size.capacities) == (48, (group(3),))
    assert size.groups == cache_groups(CONFIG, 48)


def test_trials_use_few_blocks_of_each_group() -> None:
    size = trial_kv_size(RunnerSettings(**FEW), CONFIG, torch.float32, 30)
    assert [group.num_blocks for group in size.capacities] == [30, 24]
    assert size.max_model_len == 1000


def with_encoder(longest_input: int) -> ModelSpec:
    """Return a model of 160 positions with two layers of attention and of cross attention."""
    spec = encoder_decoder_spec(100)
    return dataclasses.replace(spec, encoder=EncoderSpec(longest_input=longest_input))


INPUTS: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 400}


def test_an_encoder_has_blocks_for_as_many_inputs_as_sequences_fit() -> None:
    size = kv(with_encoder(325), **INPUTS)
    assert size.longest_encoder_input == 325
    assert [capacity.spec for capacity in size.capacities] == [Blocks(), Cross()]
    assert [capacity.num_blocks for capacity in size.capacities] == [4 * 10, 4 * 21]
    of_first, of_encoder = (capacity.block_bytes for capacity in size.capacities)
    # For two sequences, one and a half, and more of them than there may be.
    for num_blocks, expected in ((20, 42), (15, 32), (100, 84)):
        assert blocks(with_encoder(325), **INPUTS, num_blocks=num_blocks)[1:] == (expected,)
    needed = 10 * of_first + 21 * of_encoder
    fits = blocks(with_encoder(325), **INPUTS, kv_cache_bytes=needed, max_model_len=160)
    assert fits == (10, 21)
    with pytest.raises(ConfigError, match=naming("kv_cache_bytes", enough_bytes(needed))):
        kv(with_encoder(325), **INPUTS, kv_cache_bytes=needed - 1, max_model_len=160)


def test_a_shorter_sequence_has_its_input_whole() -> None:
    whole = kv(with_encoder(325), **INPUTS)
    of_first, of_encoder = (capacity.block_bytes for capacity in whole.capacities)
    size = kv(with_encoder(325), **INPUTS, kv_cache_bytes=7 * of_first + 21 * of_encoder)
    assert size.max_model_len == 7 * 16
    assert [capacity.num_blocks for capacity in size.capacities] == [7, 21]


def test_an_input_and_the_token_after_it_are_one_step() -> None:
    assert kv(with_encoder(325), max_num_batched_tokens=300).longest_encoder_input == 299
    assert kv().longest_encoder_input == 0


def test_the_log_names_the_groups() -> None:
    settings = RunnerSettings(**FEW, num_blocks=40, kv_cache_host_memory_bytes=9 * BLOCK_BYTES)
    size = size_memory(
        settings, CONFIG, dtype=torch.float32, kv_dtype=torch.float32, weights_bytes=0
    )
    line = describe_memory(0, size, settings, CONFIG)
    assert (
        "640 tokens and 144 more on the host in 2 layers with no window, "
        "384 tokens and 144 more on the host in 2 layers with a window of 50; adapters" in line
    )


def test_the_example_of_the_documentation() -> None:
    """docs/memory.md: 16 GiB for 32 layers, half of them with a window of 1024."""
    spec = tiny_spec(
        num_hidden_layers=32,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=131072,
    )

    def tokens(windows: tuple[int, ...], max_num_seqs: int) -> int:
        settings = RunnerSettings(
            kv_cache_bytes=16 << 30,
            max_model_len=32768,
            max_num_seqs=max_num_seqs,
            max_attention_window_size=windows,
        )
        size = size_kv(settings, windowed(settings, spec), torch.bfloat16)
        return size.capacities[0].num_blocks * settings.block_size

    assert tokens((), 8) == 131_072
    assert [tokens((1024, 131072), number) for number in (8, 64)] == [249_728, 162_816]


class LargeStates(RecurrenceSpec):
    """States of 64,000 bytes."""

    def caches(self) -> tuple[LayerCache, LayerCache]:
        chunk, states = RecurrenceSpec.caches(self)
        return chunk, states._replace(storage=(CachedFloats((16_000,)),))


def with_states(spec: ModelSpec, layers: tuple[int, ...] = (0, 1, 2)) -> ModelSpec:
    layered = with_recurrence(spec, layers, 32)
    return dataclasses.replace(
        layered,
        layers=tuple(
            dataclasses.replace(layer, mixer=LargeStates(spec.hidden_size, 32, 0))
            if isinstance(layer.mixer, RecurrenceSpec)
            else layer
            for layer in layered.layers
        ),
    )


STATES = with_states(ONE_GROUP)
"""Groups of one layer that attends, of the positions in chunks, and of states of 192,000 bytes."""


def test_states_of_all_sequences_and_checkpoints() -> None:
    """guaranteed_no_evict reserves three of each sequence."""
    size = kv(STATES, **FEW, num_blocks=100_000, state_checkpoint_tokens=4096)
    assert [type(group.spec) for group in size.capacities] == [Blocks, Chunk, States]
    assert [group.block_bytes for group in size.capacities] == [2048, 192, 192_000]
    assert size.capacities[2].num_blocks == 4 * 3 + 100_000 * 16 // 4096
    size = kv(STATES, **FEW, num_blocks=100_000, enable_prefix_cache=False)
    assert size.capacities[2].num_blocks == 4 * 3
    assert cache_policy(States(32), 16).max_held(1000, 32) == 3


def test_blocks_end_where_states_do() -> None:
    """A state follows whole blocks. The model has one every 32 tokens."""
    assert kv(STATES, **FEW, num_blocks=100, block_size=32).groups
    for block_size in (24, 64):
        with pytest.raises(ConfigError, match=naming("block_size", 32, block_size)) as caught:
            kv(STATES, **FEW, num_blocks=100, block_size=block_size)
        assert caught.value.param == "block_size"


@given(num_bytes=st.integers(0, 3_000_000), max_num_seqs=st.integers(1, 40))
def test_states_leave_one_sequence_its_blocks(num_bytes: int, max_num_seqs: int) -> None:
    """What it leaves is divided: states get half of it at most."""
    limits: dict[str, Any] = {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": 64}
    of_one = kv(STATES, **limits, num_blocks=63, max_model_len=1000)
    assert of_one.capacities[2].num_blocks == 3
    size = kv(STATES, **limits, kv_cache_bytes=of_one.num_bytes + num_bytes, max_model_len=1000)
    first = size.capacities[0].num_blocks
    assert size.num_bytes <= of_one.num_bytes + num_bytes
    assert kv(STATES, **limits, num_blocks=first + 1).num_bytes > of_one.num_bytes + num_bytes
    assert first >= 63
    state_bytes = (size.capacities[2].num_blocks - 3) * 192_000
    assert state_bytes <= num_bytes // 2
    least = min((num_bytes // 2 - 5_000) // 192_000, 3 * max_num_seqs - 3)
    assert size.capacities[2].num_blocks - 3 >= least


def test_a_model_of_recurrent_layers_has_no_blocks_that_no_sequence_could_use() -> None:
    alone = with_states(ONE_GROUP, (0, 1, 2, 3))
    size = kv(alone, **FEW, kv_cache_bytes=1 << 30)
    held = cache_policy(Chunk(32), 16).max_held(1000, 32)
    assert [group.num_blocks for group in size.capacities] == [4 * held, 4 * 3]


def test_the_log_names_the_size_of_a_state() -> None:
    settings = RunnerSettings(**FEW, num_blocks=400)
    size = size_memory(
        settings, STATES, dtype=torch.float32, kv_dtype=torch.float32, weights_bytes=0
    )
    line = describe_memory(0, size, settings, STATES)
    assert "states of 187.5 KiB in 3 layers with a state every 32; adapters" in line
