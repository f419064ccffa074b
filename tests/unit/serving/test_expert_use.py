"""Experts that an adapter changes, as reports name them."""

from pathlib import Path

from loraplex.adapters.staged import StagedAdapter
from loraplex.core.adapter import AdapterSource, LoraTarget
from loraplex.core.plan import CacheGroupCapacity, Capacity, PageGeometry
from loraplex.serving.adapter_cards import content_of
from loraplex.serving.expert_use import ExpertUse, expert_use

UP, DOWN = "experts.up_proj", "experts.down_proj"


def target(layer: int, module: str, expert: int, rank: int = 4, num_experts: int = 1) -> LoraTarget:
    return LoraTarget(layer, module, rank, 8, 8, expert=expert, num_experts=num_experts)


def test_experts_and_layers_are_ranges() -> None:
    targets = [
        LoraTarget(0, "q_proj", 4, 8, 8),
        LoraTarget(0, "shared_expert.up_proj", 4, 8, 8),
        LoraTarget(0, "router", 4, 8, 8),
        target(0, UP, 3),
        target(0, UP, 7, rank=2),
        *(target(layer, UP, 0, num_experts=128) for layer in range(1, 48)),
        target(2, DOWN, 0, num_experts=2),
        target(2, DOWN, 2, rank=8),
        target(5, DOWN, 0, num_experts=3),
    ]
    assert expert_use(targets) == {
        DOWN: ExpertUse(num_adapted=6, layers={"2,5": "0-2"}),
        UP: ExpertUse(num_adapted=2 + 47 * 128, layers={"0": "3,7", "1-47": "0-127"}),
    }


def test_an_adapter_without_experts_has_none() -> None:
    assert expert_use([LoraTarget(0, "q_proj", 4, 8, 8)]) == {}


def test_reports_have_the_experts_and_the_pages_of_each() -> None:
    targets = (target(0, UP, 0, num_experts=5), target(1, UP, 2, rank=8))
    staged = StagedAdapter(
        source=AdapterSource("d", str(Path("x")), 100, targets),
        dtypes=("F32",),
        num_tensors=12,
        changes_nothing=False,
    )
    capacity = Capacity(
        block_size=16,
        cache_groups=(CacheGroupCapacity(num_blocks=1),),
        max_num_seqs=1,
        max_num_batched_tokens=1,
        max_model_len=16,
        vocab_size=10,
        page_geometry=PageGeometry(slot_elements=16, slots_per_page=10),
        num_adapter_pages=10,
        adapter_page_bytes=640,
        keeps_host_copy=False,
    )
    content = content_of(staged, capacity, "float32")
    assert content.experts == {UP: ExpertUse(num_adapted=6, layers={"0": "0-4", "1": "2"})}
    assert content.ranks == {UP: (4, 8)}
    assert content.module_layers == {UP: (0, 1)}
    assert content.device_pages == 4  # of 4 slots each: two in a page; and one of 8 slots
