"""From settings to numbers of blocks and pages."""

import dataclasses
from typing import Any

import pytest
import torch

from loraplex.core.errors import ConfigError
from loraplex.execution.kv_cache import block_bytes
from loraplex.execution.sizing import (
    KVSize,
    RunnerSettings,
    choose_device,
    choose_dtype,
    choose_kv_dtype,
    size_adapter_pool,
    size_kv,
)
from loraplex.models.attention import attention_shape
from loraplex.models.config import DecoderConfig, RopeConfig

CONFIG = DecoderConfig(
    architecture="LlamaForCausalLM",
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    intermediate_size=48,
    vocab_size=100,
    max_position_embeddings=100,
    rms_norm_eps=1e-6,
    rope=RopeConfig(),
    layer_windows=(None, None),
    dtype="bfloat16",
)
SHAPE = attention_shape(CONFIG, 16)
BLOCK_BYTES = block_bytes(2, SHAPE, torch.float32)


def kv(**settings: Any) -> KVSize:
    return size_kv(RunnerSettings(**settings), CONFIG, SHAPE, torch.float32)


def test_default_is_room_for_every_sequence() -> None:
    assert kv(max_num_seqs=3) == KVSize(max_model_len=100, num_blocks=21)


def test_default_is_at_most_2_gib() -> None:
    size = kv(max_num_seqs=10**6)
    assert size.num_blocks == (2 << 30) // BLOCK_BYTES


def test_explicit_sizes() -> None:
    assert kv(kv_cache_bytes=9 * BLOCK_BYTES + 1, max_model_len=50) == KVSize(50, 9)
    assert kv(num_blocks=7) == KVSize(100, 7)


def test_an_open_length_shrinks_to_the_cache() -> None:
    assert kv(num_blocks=2) == KVSize(32, 2)


def test_a_wanted_length_that_does_not_fit() -> None:
    with pytest.raises(ConfigError, match=f"set kv_cache_bytes to at least {4 * BLOCK_BYTES}"):
        kv(num_blocks=2, max_model_len=50)
    with pytest.raises(ConfigError, match="holds 0 tokens"):
        kv(kv_cache_bytes=1)


def test_a_length_that_the_model_does_not_have() -> None:
    with pytest.raises(ConfigError, match="101 is more than the 100 positions"):
        kv(max_model_len=101)


def test_dtype() -> None:
    assert choose_dtype(RunnerSettings(), CONFIG) == torch.bfloat16
    untold = dataclasses.replace(CONFIG, dtype=None)
    assert choose_dtype(RunnerSettings(), untold) == torch.float32
    assert choose_dtype(RunnerSettings(dtype="float16"), CONFIG) == torch.float16
    with pytest.raises(ConfigError, match="'int8' is none of auto, float32"):
        choose_dtype(RunnerSettings(dtype="int8"), CONFIG)


def test_kv_dtype() -> None:
    assert choose_kv_dtype(RunnerSettings(), torch.bfloat16) == torch.bfloat16
    assert choose_kv_dtype(RunnerSettings(kv_dtype="float32"), torch.bfloat16) == torch.float32
    assert choose_kv_dtype(RunnerSettings(kv_dtype="int8"), torch.bfloat16) == torch.int8
    with pytest.raises(ConfigError, match="kv_dtype 'int4' is none of auto, float32"):
        choose_kv_dtype(RunnerSettings(kv_dtype="int4"), torch.bfloat16)


def test_int8_keys_and_values_have_scales() -> None:
    per_block = 2 * 2 * 16 * 2 * (8 + 4)
    assert block_bytes(2, SHAPE, torch.int8) == per_block
    settings = RunnerSettings(kv_cache_bytes=10 * per_block - 1)
    assert size_kv(settings, CONFIG, SHAPE, torch.int8).num_blocks == 9


def test_device(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_device(RunnerSettings()) == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="no CUDA device"):
        choose_device(RunnerSettings(device="cuda:1"))


def test_default_pool_holds_256_mib() -> None:
    size = size_adapter_pool(RunnerSettings(), CONFIG, torch.bfloat16)
    assert size.page_bytes == 2 * size.geometry.page_elements
    assert size.num_pages == (256 << 20) // size.page_bytes


def test_an_adapter_of_the_usual_rank_is_one_page() -> None:
    settings = RunnerSettings(max_lora_rank=8, optimal_lora_rank=8, lora_device_bytes=1 << 20)
    size = size_adapter_pool(settings, CONFIG, torch.bfloat16)
    one_page = dataclasses.replace(settings, lora_device_bytes=size.page_bytes)
    assert size_adapter_pool(one_page, CONFIG, torch.bfloat16).num_pages == 1


def test_a_pool_that_is_too_small_says_what_it_takes() -> None:
    settings = RunnerSettings(lora_device_bytes=1000)
    with pytest.raises(ConfigError, match="rank 64 on all modules: set at least") as caught:
        size_adapter_pool(settings, CONFIG, torch.bfloat16)
    enough = int(caught.value.message.split()[-1])
    settings = RunnerSettings(lora_device_bytes=enough)
    assert size_adapter_pool(settings, CONFIG, torch.bfloat16).num_pages > 0
    with pytest.raises(ConfigError):
        size_adapter_pool(RunnerSettings(lora_device_bytes=enough - 1), CONFIG, torch.bfloat16)
