"""Numbers of blocks and pages that follow from settings."""

import dataclasses
import re
from typing import Any

import hypothesis.strategies as st
import msgspec
import pytest
import torch
from hypothesis import given

from loraplex.core.byte_sizes import enough_bytes, parse_bytes, readable_bytes
from loraplex.core.errors import ConfigError
from loraplex.core.rank_limits import RankLimits
from loraplex.execution.sizing.capacity import (
    MemorySize,
    choose_device,
    choose_dtype,
    choose_kv_dtype,
    describe_memory,
    size_adapter_pool,
    size_memory,
    smallest_pool,
)
from loraplex.execution.sizing.kv import block_bytes, size_kv
from loraplex.execution.sizing.settings import RunnerSettings
from loraplex.execution.sizing.step_memory import StepMemory
from loraplex.memory.adapter_cache import AdapterCache
from loraplex.memory.adapter_pages import layer_targets, pages_at_ranks
from support.naming import naming, refused
from support.tiny_decoder import TINY_DECODER, tiny_spec

BLOCK_BYTES = block_bytes(TINY_DECODER, 16, torch.float32)


def kv(**settings: Any) -> tuple[int, int]:
    """Return max_model_len and the number of blocks of the only cache group."""
    size = size_kv(RunnerSettings(**settings), TINY_DECODER, torch.float32)
    (group,) = size.capacities
    assert size.num_bytes == group.num_blocks * BLOCK_BYTES
    return size.max_model_len, group.num_blocks


def test_default_holds_every_sequence() -> None:
    assert kv(max_num_seqs=3) == (100, 21)


def test_default_is_at_most_2_gib() -> None:
    assert kv(max_num_seqs=10**6) == (100, (2 << 30) // BLOCK_BYTES)


def test_explicit_sizes() -> None:
    assert kv(kv_cache_bytes=9 * BLOCK_BYTES + 1, max_model_len=50) == (50, 9)
    assert kv(num_blocks=7) == (100, 7)


def test_an_open_length_shrinks_to_the_cache() -> None:
    assert kv(num_blocks=2) == (32, 2)


def test_a_wanted_length_that_does_not_fit() -> None:
    with pytest.raises(ConfigError, match=naming("kv_cache_bytes", enough_bytes(4 * BLOCK_BYTES))):
        kv(num_blocks=2, max_model_len=50)
    with pytest.raises(ConfigError, match="holds 0 tokens"):
        kv(kv_cache_bytes=1)


def test_a_length_that_the_model_does_not_have() -> None:
    with pytest.raises(ConfigError, match=naming(101, 100)):
        kv(max_model_len=101)


def test_dtype() -> None:
    assert choose_dtype(RunnerSettings(), TINY_DECODER) == torch.bfloat16
    untold = dataclasses.replace(TINY_DECODER, dtype=None)
    assert choose_dtype(RunnerSettings(), untold) == torch.float32
    assert choose_dtype(RunnerSettings(dtype="float16"), TINY_DECODER) == torch.float16
    with pytest.raises(ConfigError, match=naming("dtype", "float32", "int8")):
        choose_dtype(RunnerSettings(dtype="int8"), TINY_DECODER)


def test_kv_dtype() -> None:
    assert choose_kv_dtype(RunnerSettings(), torch.bfloat16) == torch.bfloat16
    assert choose_kv_dtype(RunnerSettings(kv_dtype="float32"), torch.bfloat16) == torch.float32
    assert choose_kv_dtype(RunnerSettings(kv_dtype="int8"), torch.bfloat16) == torch.int8
    with pytest.raises(ConfigError, match=naming("kv_dtype", "float32", "int4")):
        choose_kv_dtype(RunnerSettings(kv_dtype="int4"), torch.bfloat16)


def test_int8_keys_and_values_have_scales() -> None:
    per_block = 2 * 2 * 16 * 2 * (8 + 4)
    assert block_bytes(TINY_DECODER, 16, torch.int8) == per_block
    settings = RunnerSettings(kv_cache_bytes=10 * per_block - 1)
    assert size_kv(settings, TINY_DECODER, torch.int8).capacities[0].num_blocks == 9


def test_device(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_device(RunnerSettings()) == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with refused(ConfigError, "CUDA", param="device"):
        choose_device(RunnerSettings(device="cuda:1"))


def test_default_pool_holds_256_mib() -> None:
    size = size_adapter_pool(RunnerSettings(), TINY_DECODER, torch.bfloat16)
    assert size.page_bytes == 2 * size.geometry.page_elements
    assert size.num_pages == (256 << 20) // size.page_bytes


GIB = 1 << 30
LARGE = tiny_spec(hidden_size=4096, intermediate_size=14336, num_hidden_layers=32)


@pytest.mark.parametrize(
    ("spare", "least_mib", "most_mib"),
    [(None, 256, 290), (-GIB, 256, 290), (GIB // 4, 256, 290), (4 * GIB, 2048, 2048)],
)
def test_the_default_pool_has_half_of_what_the_host_leaves(
    spare: int | None, least_mib: int, most_mib: int
) -> None:
    weights, kv_bytes = 5 * GIB, host_size(None, 0).kv.num_bytes
    host = None if spare is None else weights + kv_bytes + spare
    size = host_size(host, weights)
    assert size.kv.num_bytes == kv_bytes
    assert least_mib << 20 <= size.adapters.num_bytes + size.adapters.page_bytes
    assert size.adapters.num_pages * size.adapters.page_bytes <= most_mib << 20


def test_the_default_pool_has_places_for_256_adapters() -> None:
    size = host_size(1000 * GIB, 5 * GIB)
    limits = RankLimits(RunnerSettings().optimal_lora_rank)
    targets = layer_targets(LARGE.module_shapes)
    assert size.adapters.num_pages == 256 * pages_at_ranks(targets, limits, size.adapters.geometry)
    assert host_size(2000 * GIB, 5 * GIB, num_ranks=2) == size


@pytest.mark.parametrize("settings", [{"lora_device_bytes": 3 << 30}, {"memory_bytes": 100 * GIB}])
def test_the_host_matters_only_by_default(settings: dict[str, int]) -> None:
    assert host_size(1000 * GIB, GIB, **settings) == host_size(None, GIB, **settings)


def host_size(
    host_bytes: int | None, weights_bytes: int, num_ranks: int = 1, **settings: Any
) -> MemorySize:
    """Return the sizes of a rank of several on a host."""
    return size_memory(
        RunnerSettings(**settings).share_of_host(num_ranks, host_bytes),
        LARGE,
        dtype=torch.bfloat16,
        kv_dtype=torch.bfloat16,
        weights_bytes=weights_bytes,
    )


def test_a_pool_of_just_one_adapter_of_the_usual_rank() -> None:
    settings = RunnerSettings(max_lora_rank=8, optimal_lora_rank=8)
    pool = smallest_pool(settings, TINY_DECODER, torch.bfloat16)
    least = pool.num_pages * pool.page_bytes
    parameters = 8 * sum(
        sum(features) for shapes in TINY_DECODER.module_shapes for features in shapes.values()
    )
    assert 2 * parameters <= least < 1.1 * 2 * parameters
    settings = msgspec.structs.replace(settings, lora_device_bytes=least)
    size = size_adapter_pool(settings, TINY_DECODER, torch.bfloat16)
    assert size.num_pages * size.page_bytes == least


def test_a_pool_that_is_too_small_says_what_it_takes() -> None:
    settings = RunnerSettings(lora_device_bytes=1000)
    with refused(ConfigError, 64, "lora_device_bytes", 1000, param="lora_device_bytes") as caught:
        size_adapter_pool(settings, TINY_DECODER, torch.bfloat16)
    enough = parse_bytes(caught.value.message.split()[-1])
    settings = RunnerSettings(lora_device_bytes=enough)
    assert size_adapter_pool(settings, TINY_DECODER, torch.bfloat16).num_pages > 0
    with pytest.raises(ConfigError):
        size_adapter_pool(
            RunnerSettings(lora_device_bytes=int(enough * 0.99) - 1), TINY_DECODER, torch.bfloat16
        )


WEIGHTS = 1 << 20
NO_STEPS = StepMemory()


def memory(
    free_bytes: int | None = None, steps: StepMemory = NO_STEPS, **settings: Any
) -> MemorySize:
    return size_memory(
        RunnerSettings(**settings),
        TINY_DECODER,
        dtype=torch.float32,
        kv_dtype=torch.float32,
        weights_bytes=WEIGHTS,
        free_bytes=free_bytes,
        steps=steps,
    )


def kv_bytes(size: MemorySize) -> int:
    return size.kv.num_bytes


def pool_bytes(size: MemorySize) -> int:
    return size.adapters.num_pages * size.adapters.page_bytes


class TestMemory:
    def test_unknown_memory_is_sized_by_the_requests(self) -> None:
        size = memory(max_num_seqs=3)
        assert (size.kv.max_model_len, size.kv.capacities[0].num_blocks) == kv(max_num_seqs=3)
        assert pool_bytes(size) == pytest.approx(256 << 20, rel=0.01)

    def test_shares_of_a_cpus_budget(self) -> None:
        budget = 200 << 20
        size = memory(memory_bytes=budget, kv_cache_fraction=0.5)
        assert kv_bytes(size) == pytest.approx(0.5 * (budget - WEIGHTS), rel=0.01)
        assert pool_bytes(size) == pytest.approx(0.05 * budget, rel=0.01)

    def test_shares_of_what_a_device_has_free(self) -> None:
        free = 200 << 20
        size = memory(free, lora_device_fraction=0.5)
        assert kv_bytes(size) == pytest.approx(0.9 * free, rel=0.01)
        assert pool_bytes(size) == pytest.approx(0.5 * 0.1 * free, rel=0.02)

    def test_a_budget_below_what_is_free(self) -> None:
        budget = 100 << 20
        size = memory(200 << 20, memory_bytes=budget)
        assert kv_bytes(size) == pytest.approx(0.9 * (budget - WEIGHTS), rel=0.01)

    def test_bytes_that_are_said_win(self) -> None:
        size = memory(memory_bytes=200 << 20, kv_cache_bytes=1 << 20, lora_device_bytes=2 << 20)
        assert kv_bytes(size) == (1 << 20) // BLOCK_BYTES * BLOCK_BYTES
        assert pool_bytes(size) == pytest.approx(2 << 20, rel=0.1)

    def test_one_adapter_fits_however_small_its_share(self) -> None:
        least = smallest_pool(RunnerSettings(), TINY_DECODER, torch.float32).num_bytes
        size = memory(memory_bytes=WEIGHTS + least + 20 * BLOCK_BYTES, kv_cache_fraction=1.0)
        assert size.adapters.num_bytes == least
        assert size.kv.capacities[0].num_blocks == 20

    def test_weights_that_do_not_fit(self) -> None:
        with pytest.raises(ConfigError, match=naming("--memory", "memory_bytes")) as caught:
            memory(memory_bytes=WEIGHTS)
        size = readable_bytes(WEIGHTS)
        assert re.search(naming(size, "memory_bytes", size, "--memory"), caught.value.message)

    def test_what_was_said_does_not_fit(self) -> None:
        with pytest.raises(ConfigError, match=naming("10 MiB")) as caught:
            memory(memory_bytes=10 << 20, kv_cache_bytes=9 << 20, lora_device_bytes=9 << 20)
        assert caught.value.param == "memory_bytes"

    def test_a_length_that_does_not_fit_names_the_budget(self) -> None:
        least = smallest_pool(RunnerSettings(), TINY_DECODER, torch.float32).num_bytes
        with refused(
            ConfigError, "--memory", "max_model_len", 100, param="kv_cache_bytes"
        ) as caught:
            memory(memory_bytes=WEIGHTS + least + 3 * BLOCK_BYTES, max_model_len=100)
        enough = parse_bytes(caught.value.message.split()[-1])
        assert memory(memory_bytes=enough, max_model_len=100).kv.max_model_len == 100
        with refused(ConfigError, "--memory", "max_model_len", 100, param="kv_cache_bytes"):
            memory(memory_bytes=int(enough * 0.98), max_model_len=100)

    def test_steps_come_before_the_shares(self) -> None:
        free, steps = 200 << 20, StepMemory(60 << 20, 40 << 20)
        size = memory(free, steps, lora_device_fraction=0.5)
        assert kv_bytes(size) == pytest.approx(0.9 * (100 << 20), rel=0.01)
        assert pool_bytes(size) == pytest.approx(0.5 * 0.1 * (100 << 20), rel=0.02)

    def test_a_budget_holds_the_steps_too(self) -> None:
        budget, steps = 100 << 20, StepMemory(20 << 20, 10 << 20)
        size = memory(200 << 20, steps, memory_bytes=budget)
        assert kv_bytes(size) == pytest.approx(0.9 * (budget - WEIGHTS - (30 << 20)), rel=0.01)

    def test_steps_that_leave_too_little_name_what_to_lower(self) -> None:
        least = smallest_pool(RunnerSettings(), TINY_DECODER, torch.float32).num_bytes + BLOCK_BYTES
        steps = StepMemory(60 << 20, 40 << 20)
        fits = memory((100 << 20) + least, steps)
        assert fits.kv.capacities[0].num_blocks == 1
        with pytest.raises(ConfigError, match=naming("7 B", "cuda_graphs")) as caught:
            memory((100 << 20) + least - 7, steps)
        assert caught.value.param == "max_num_batched_tokens"

    def test_said_bytes_that_a_device_does_not_have(self) -> None:
        with pytest.raises(ConfigError, match=naming("kv_cache_bytes", 100)) as caught:
            memory(100 << 20, kv_cache_bytes=100 << 20)
        assert caught.value.param == "kv_cache_bytes"
        (by,) = map(parse_bytes, re.findall(r"kv_cache_bytes by (\w+)", caught.value.message))
        memory(100 << 20, kv_cache_bytes=(100 << 20) - by)
        with pytest.raises(ConfigError):
            memory(100 << 20, kv_cache_bytes=(100 << 20) - by + BLOCK_BYTES)
        with refused(ConfigError, "lora_device_bytes", param="lora_device_bytes"):
            memory(100 << 20, lora_device_bytes=200 << 20)

    def test_the_line_of_the_log(self) -> None:
        size, settings = memory(200 << 20), RunnerSettings()
        line = describe_memory(3 << 20, size, settings, TINY_DECODER)
        assert line.startswith("memory: weights 3 MiB; KV cache 180 MiB")
        steps = StepMemory(5 << 20, 7 << 20)
        line = describe_memory(3 << 20, size, settings, TINY_DECODER, steps)
        assert "weights 3 MiB; steps 5 MiB; recorded steps 7 MiB; KV cache" in line

    @given(st.integers(1 << 21, 1 << 28), st.floats(0.01, 1.0), st.floats(0.01, 1.0))
    def test_all_together_never_exceed_the_budget(
        self, budget: int, kv_fraction: float, lora_fraction: float
    ) -> None:
        try:
            size = memory(
                memory_bytes=budget,
                kv_cache_fraction=kv_fraction,
                lora_device_fraction=lora_fraction,
            )
        except ConfigError:
            assert budget < WEIGHTS + (3 << 20)
        else:
            assert WEIGHTS + kv_bytes(size) + pool_bytes(size) <= budget


@pytest.mark.parametrize("rank", [1, 8, 13, 64])
def test_a_pool_that_holds_n_adapters_takes_n(rank: int) -> None:
    pool = memory(memory_bytes=40 << 20).adapters
    targets = layer_targets(TINY_DECODER.module_shapes)
    num_pages = pages_at_ranks(targets, RankLimits(rank), pool.geometry)
    holds = pool.num_pages // num_pages
    cache = AdapterCache(10**6, pool.num_pages, keeps_host_copy=False)
    for handle in range(holds + 1):
        cache.register(handle, 1, num_pages)
        cache.begin_load(handle, 0)
        cache.loaded(handle)
        copied = cache.begin_copy(handle) is not None
        assert copied == (handle < holds)
        if copied:
            cache.copied(handle)
            cache.acquire(handle)
    assert holds > 0
