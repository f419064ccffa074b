"""What lies where, in numbers."""

import msgspec

from loraplex.core.cache import Blocks, Cross, States
from loraplex.core.config import ModelConfig
from loraplex.core.plan import CacheGroupCapacity, PageGeometry
from loraplex.core.stats import AdapterTierStats, CacheGroupStats, EngineStats
from loraplex.memory.adapter_pages import layer_targets
from loraplex.serving.model_memory import (
    AcceleratorMemory,
    CacheGroupMemory,
    DeviceTier,
    HostTier,
    KVMemory,
    ModelMemory,
    RankFit,
    StoredAdapters,
    memory_of,
    stored,
)
from support.fake_runner import FAKE_CAPACITY

CAPACITY = msgspec.structs.replace(
    FAKE_CAPACITY,
    num_adapter_pages=10,
    adapter_page_bytes=400,
    page_geometry=PageGeometry(slot_elements=10, slots_per_page=10),
    kv_cache_bytes=7000,
    weights_bytes=9000,
)
STATS = EngineStats(
    blocks_held=6,
    blocks_cached=50,
    adapters=AdapterTierStats(
        device_pages_used=3, num_on_device=2, num_held=1, host_bytes_used=300, num_on_host=4
    ),
)
TARGETS = layer_targets([{"q": (4, 6)}] * 2)
MODEL = ModelConfig(path="m", optimal_lora_rank=1, max_lora_rank=8, lora_host_bytes=1000)


def test_every_number_is_in_its_place():
    memory = memory_of(CAPACITY, STATS, targets=TARGETS, model=MODEL)
    assert memory == ModelMemory(
        max_num_seqs=8,
        max_num_batched_tokens=512,
        weights_bytes=9000,
        kv=KVMemory(
            num_bytes=7000, block_tokens=16, blocks=256, tokens=4096, held=6, cached=50, free=200
        ),
        device=DeviceTier(
            num_bytes=4000,
            page_bytes=400,
            pages=10,
            pages_used=3,
            adapters=2,
            held=1,
            fits=(
                RankFit(rank=1, pages=1, holds=10, more=7),
                RankFit(rank=8, pages=2, holds=5, more=3),
            ),
        ),
        host=HostTier(num_bytes=1000, bytes_used=300, adapters=4),
    )


def test_blocks_are_counted_together_and_by_cache_group():
    groups = (
        CacheGroupCapacity(num_blocks=100, num_host_blocks=8),
        CacheGroupCapacity(num_blocks=40, num_host_blocks=5, spec=Blocks(64), block_bytes=70),
    )
    capacity = msgspec.structs.replace(CAPACITY, cache_groups=groups)
    stats = msgspec.structs.replace(
        STATS,
        blocks_held=9,
        blocks_cached=31,
        blocks_on_host=3,
        cache_groups=(CacheGroupStats(6, 30, 2), CacheGroupStats(3, 1, 1)),
    )
    kv = memory_of(capacity, stats, targets=TARGETS, model=MODEL).kv
    assert (kv.blocks, kv.held, kv.cached, kv.free, kv.tokens) == (140, 9, 31, 100, 1600)
    assert (kv.host_blocks, kv.host_used) == (13, 3)
    full, window = kv.groups
    assert full == CacheGroupMemory(
        attention_window=None, blocks=100, held=6, cached=30, free=64, host_blocks=8, host_used=2
    )
    assert window == CacheGroupMemory(
        attention_window=64,
        blocks=40,
        block_bytes=70,
        held=3,
        cached=1,
        free=36,
        host_blocks=5,
        host_used=1,
    )
    assert [
        group.free
        for group in memory_of(capacity, EngineStats(), targets=TARGETS, model=MODEL).kv.groups
    ] == [
        100,
        40,
    ]


def test_states_are_blocks_of_their_own():
    groups = (
        CacheGroupCapacity(num_blocks=100),
        CacheGroupCapacity(num_blocks=6, spec=States(64), block_bytes=5000),
    )
    capacity = msgspec.structs.replace(CAPACITY, cache_groups=groups)
    positions, states = memory_of(capacity, STATS, targets=TARGETS, model=MODEL).kv.groups
    assert (positions.state_tokens, states.state_tokens) == (0, 64)
    assert (states.blocks, states.block_bytes) == (6, 5000)


def test_blocks_of_an_encoder_are_marked():
    groups = (
        CacheGroupCapacity(num_blocks=100),
        CacheGroupCapacity(num_blocks=6, spec=Cross(), block_bytes=5000),
    )
    capacity = msgspec.structs.replace(CAPACITY, cache_groups=groups)
    found = memory_of(capacity, STATS, targets=TARGETS, model=MODEL).kv.groups
    assert [group.is_of_encoder for group in found] == [False, True]


def test_a_device_of_its_own():
    capacity = msgspec.structs.replace(
        CAPACITY,
        adapter_table_bytes=70,
        workspace_bytes=300,
        graph_bytes=20,
        device_bytes=30000,
        device_free_bytes=5000,
    )
    memory = memory_of(capacity, STATS, targets=TARGETS, model=MODEL)
    assert (memory.workspace_bytes, memory.graph_bytes) == (300, 20)
    other = 30000 - 5000 - (9000 + 300 + 20 + 7000 + 4000 + 70)
    assert memory.device.table_bytes == 70
    assert memory.accelerator == AcceleratorMemory(total=30000, free=5000, other=other)
    assert memory_of(CAPACITY, STATS, targets=TARGETS, model=MODEL).accelerator is None


def test_files_are_counted_once(tmp_path):
    (tmp_path / "x").write_bytes(b"12345")
    paths = [str(tmp_path / name) for name in ("x", "x", "gone")]
    assert stored(3, paths) == StoredAdapters(adapters=3, files=1, num_bytes=5)
