"""Sizes of models whose layers differ, some with experts."""

import numpy as np
import torch

from loraplex.core.byte_sizes import parse_bytes, readable_bytes
from loraplex.core.errors import ConfigError
from loraplex.core.plan import PageGeometry
from loraplex.execution.adapters.entry_tables import EntryTables, head_modules
from loraplex.execution.sizing.capacity import (
    MemorySize,
    describe_memory,
    size_adapter_pool,
    size_memory,
    smallest_pool,
)
from loraplex.execution.sizing.settings import RunnerSettings
from loraplex.execution.sizing.step_memory import bytes_per_token
from loraplex.kernels.lora import CELL_BYTES
from loraplex.memory.adapter_pages import layer_targets, pages_at_ranks
from loraplex.models.spec import ModelSpec
from support.naming import refused
from support.tiny_decoder import TINY_DECODER, tiny_spec

EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
DIFFERING = tiny_spec(
    "Qwen2MoeForCausalLM",
    **EXPERTS,
    shared_expert_intermediate_size=40,
    mlp_only_layers=[0],
    norm_topk_prob=False,
)
"""Layer 0 is dense, layer 1 has experts."""


def mixtral(**changes: int) -> ModelSpec:
    fields = {"num_local_experts": 8, "num_experts_per_tok": 2} | changes
    return tiny_spec("MixtralForCausalLM", **fields)


def test_the_pool_holds_the_largest_adapter_of_layers_that_differ() -> None:
    settings = RunnerSettings(max_lora_rank=8, max_lora_ranks={"experts": 2}, lora_device_bytes=1)
    with refused(
        ConfigError,
        8,
        "experts",
        2,
        "lora_device_bytes",
        1,
        "max_lora_rank",
        "max_lora_ranks",
        param="lora_device_bytes",
    ) as caught:
        size_adapter_pool(settings, DIFFERING, torch.bfloat16)
    enough = parse_bytes(caught.value.message.split()[-1])
    settings = RunnerSettings(
        max_lora_rank=8, max_lora_ranks={"experts": 2}, lora_device_bytes=enough
    )
    pool = size_adapter_pool(settings, DIFFERING, torch.bfloat16)
    targets = layer_targets(DIFFERING.module_shapes, num_experts=DIFFERING.num_experts)
    assert {target.layer for target in targets if target.module == "gate_proj"} == {0}
    assert [t.num_experts for t in targets if t.module == "experts.up_proj"] == [8]
    assert pool.num_pages == pages_at_ranks(targets, settings.rank_limits, pool.geometry)


def test_lower_ranks_of_experts_make_a_smaller_pool() -> None:
    def smallest(**ranks: int) -> int:
        settings = RunnerSettings(max_lora_rank=16, optimal_lora_rank=16, max_lora_ranks=ranks)
        return smallest_pool(settings, mixtral(), torch.float32).num_bytes

    assert smallest(experts=4) < smallest() / 2


def size(num_experts: int, memory_bytes: int) -> MemorySize:
    return size_memory(
        RunnerSettings(memory_bytes=memory_bytes, lora_device_fraction=0.5, kv_cache_fraction=0.2),
        mixtral(num_local_experts=num_experts),
        dtype=torch.float32,
        kv_dtype=torch.float32,
        weights_bytes=1 << 20,
    )


def test_tables_are_part_of_the_memory() -> None:
    few, many = size(2, 20 << 20), size(64, 20 << 20)
    assert many.adapters.entry_bytes > 10 * few.adapters.entry_bytes
    for sizes in (few, many):
        pool = sizes.adapters
        assert pool.num_bytes == pool.num_pages * (pool.page_bytes + pool.entry_bytes)
        assert pool.num_bytes <= 0.5 * (20 << 20)
        assert 1.1 * pool.num_bytes > 0.5 * (20 << 20)
    settings = RunnerSettings(memory_bytes=20 << 20)
    text = describe_memory(1, many, settings, mixtral(num_local_experts=64))
    assert f"with tables of {readable_bytes(many.adapters.table_bytes)}" in text


def test_an_entry_has_the_bytes_that_are_counted() -> None:
    spec = mixtral()
    tables = EntryTables(
        5,
        spec.module_shapes,
        head_modules(spec.module_shapes, spec.hidden_size, spec.vocab_size),
        num_experts=spec.num_experts,
        alignment=1,
        max_rank=8,
        accelerator=None,
    )
    assert tables.head is not None
    arrays: list[np.ndarray] = []
    for table in (tables.layers, tables.head):
        arrays += [table.offsets, table.ranks, table.scales]
    pool = size_adapter_pool(RunnerSettings(), spec, torch.float32)
    assert sum(array.nbytes for array in arrays) == 5 * pool.entry_bytes
    cells = 2 * (4 + 1 + 3 * 8)
    assert pool.entry_bytes == (cells + len(tables.head.cells)) * CELL_BYTES


def test_steps_have_rows_for_each_chosen_expert() -> None:
    settings = RunnerSettings(max_lora_rank=4)

    def of(spec: ModelSpec) -> int:
        return bytes_per_token(settings, spec, torch.float32)

    one, two = of(mixtral(num_experts_per_tok=1)), of(mixtral())
    inner, hidden, lora, route = 3 * 48 * 4, 32 * 4, 3 * 4 * 4, 12
    assert two - one == inner + hidden + lora + route
    scores = 2 * 4 * 8
    assert one == of(TINY_DECODER) + hidden + scores + route
    assert of(mixtral(num_local_experts=16)) == two + scores


def test_a_shared_expert_counts() -> None:
    settings = RunnerSettings()
    larger = tiny_spec(
        "Qwen2MoeForCausalLM", **EXPERTS, shared_expert_intermediate_size=80, norm_topk_prob=False
    )
    smaller = tiny_spec(
        "Qwen2MoeForCausalLM", **EXPERTS, shared_expert_intermediate_size=40, norm_topk_prob=False
    )
    sizes = [bytes_per_token(settings, spec, torch.float32) for spec in (larger, smaller)]
    assert sizes[0] - sizes[1] == 3 * 40 * 4


def test_slots_are_aligned_with_a_gate_of_one_output() -> None:
    pool = size_adapter_pool(RunnerSettings(), DIFFERING, torch.float32)
    assert isinstance(pool.geometry, PageGeometry)
    assert pool.geometry.slot_elements == 48  # 33 in steps of 16
