from typing import ClassVar

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given

from loraplex.core.adapter import LoraTarget, each_expert, join_experts
from loraplex.core.errors import AdapterTooLargeError, ConfigError
from loraplex.core.plan import PageGeometry
from loraplex.core.rank_limits import RankLimits
from loraplex.memory.adapter_pages import (
    layer_targets,
    page_geometry,
    pages_at_ranks,
    pages_for_bytes,
    pages_of,
    place,
)
from support.naming import naming


def layers(shapes, num_layers, rank=1):
    return [
        LoraTarget(layer, module, rank, in_features, out_features)
        for layer in range(num_layers)
        for module, (in_features, out_features) in shapes.items()
    ]


LLAMA_7B_QKV = dict.fromkeys(("q_proj", "k_proj", "v_proj"), (4096, 4096))


class TestLlama7B:
    """q, k and v of LLaMA-7B in fp16, pages made for rank 8: a quarter of TensorRT-LLM's."""

    targets = layers(LLAMA_7B_QKV, 32)
    geometry = page_geometry(targets, usual_ranks=RankLimits(8), max_ranks=RankLimits(64))

    def test_geometry(self):
        assert self.geometry == PageGeometry(slot_elements=8192, slots_per_page=192)
        assert self.geometry.page_elements * 2 == 3 * 2**20

    @pytest.mark.parametrize(
        ("rank", "num_pages"), [(1, 1), (2, 1), (8, 4), (9, 5), (16, 8), (64, 32)]
    )
    def test_pages_of_an_adapter(self, rank, num_pages):
        assert place(layers(LLAMA_7B_QKV, 32, rank), self.geometry).num_pages == num_pages

    def test_three_targets_of_rank_64_fill_a_page(self):
        placement = place(layers(LLAMA_7B_QKV, 32, 64), self.geometry)
        counts = [0] * placement.num_pages
        for spot in placement.places:
            counts[spot.page_index] += 1
        assert counts == [3] * 32

    def test_pages_of_a_host_budget(self):
        assert pages_for_bytes(2**30, self.geometry, element_bytes=2) == 341
        assert pages_for_bytes(3 * 2**20 - 1, self.geometry, element_bytes=2) == 0

    def test_largest_adapter(self):
        assert pages_at_ranks(self.targets, RankLimits(64), self.geometry) == 32


class TestAllModules:
    """Seven modules of LLaMA-7B: what an adapter of only three of them takes."""

    shapes = LLAMA_7B_QKV | {
        "o_proj": (4096, 4096),
        "gate_proj": (4096, 11008),
        "up_proj": (4096, 11008),
        "down_proj": (11008, 4096),
    }
    targets = layers(shapes, 32)
    geometry = page_geometry(targets, usual_ranks=RankLimits(8), max_ranks=RankLimits(64))

    def test_the_usual_adapter_fills_its_pages(self):
        usual = layers(self.shapes, 32, 8)
        slots = sum(self.geometry.slots_of(target) for target in usual)
        assert place(usual, self.geometry).num_pages * self.geometry.slots_per_page == slots

    @pytest.mark.parametrize("rank", [8, 16, 32, 64])
    def test_an_adapter_of_three_modules_wastes_a_quarter_at_most(self, rank):
        adapter = layers(LLAMA_7B_QKV, 32, rank)
        slots = sum(self.geometry.slots_of(target) for target in adapter)
        taken = place(adapter, self.geometry).num_pages * self.geometry.slots_per_page
        assert slots / taken > 0.75

    def test_the_largest_adapter_wastes_a_quarter_at_most(self):
        slots = sum(self.geometry.slots_of(target) for target in layers(self.shapes, 32, 64))
        taken = (
            pages_at_ranks(self.targets, RankLimits(64), self.geometry)
            * self.geometry.slots_per_page
        )
        assert slots / taken > 0.75


class TestExperts:
    """A model as Qwen3-30B-A3B: 128 experts in each of 48 layers."""

    attention: ClassVar = {
        "q_proj": (2048, 4096),
        "k_proj": (2048, 512),
        "v_proj": (2048, 512),
        "o_proj": (4096, 2048),
    }
    experts: ClassVar = {
        "router": (2048, 128),
        "shared_expert_gate": (2048, 1),
        "experts.gate_proj": (2048, 768),
        "experts.up_proj": (2048, 768),
        "experts.down_proj": (768, 2048),
    }
    numbers: ClassVar = {module: 128 for module in experts if module.startswith("experts.")}
    limits = RankLimits(64, {"experts": 16})
    targets = layer_targets([attention | experts] * 48, num_experts=[numbers] * 48)
    geometry = page_geometry(targets, usual_ranks=RankLimits(8), max_ranks=limits)

    def test_every_offset_is_aligned(self):
        assert self.geometry.slot_elements == 2064  # 2049 features of the gate, in steps of 16
        layer = [target for target in self.targets if target.layer == 0]
        places = place(layer, self.geometry).places
        assert len(places) == 4 + 2 + 3 * 128
        assert all(spot.offset % 16 == 0 for spot in places)

    def test_a_page_is_a_small_part_of_a_layer(self):
        layer = sum(8 * sum(shape) for shape in self.experts.values())
        layer += 8 * 127 * sum(sum(self.experts[module]) for module in self.numbers)
        assert 2 * 64 * 6144 <= self.geometry.page_elements < layer / 3

    def test_a_row_of_the_tables_is_small_beside_its_page(self):
        assert self.geometry.page_elements * 2 / 8 >= 16 * 48 * (4 + 2 + 3 * 128)

    def test_an_adapter_of_attention_wastes_little(self):
        adapter = layer_targets([self.attention] * 48, RankLimits(8))
        slots, placement = sum(map(self.geometry.slots_of, adapter)), place(adapter, self.geometry)
        assert slots / (placement.num_pages * self.geometry.slots_per_page) > 0.85

    @pytest.mark.parametrize("rank", [1, 8, 16])
    def test_an_adapter_of_all_experts_is_spread_over_many_pages(self, rank):
        adapter = layer_targets([self.experts] * 48, RankLimits(rank), [self.numbers] * 48)
        placement = place(adapter, self.geometry)
        slots = sum(self.geometry.slots_of(target) * target.num_experts for target in adapter)
        assert placement.num_pages == pages_of(adapter, self.geometry) > 10
        assert slots / (placement.num_pages * self.geometry.slots_per_page) > 0.8
        assert placement.num_pages <= pages_at_ranks(self.targets, self.limits, self.geometry)

    def test_few_experts_take_few_pages(self):
        adapter = [target for target in each_expert(self.targets) if target.expert == 5]
        assert place(adapter, self.geometry).num_pages == 1


def test_offsets_are_whole_slots_one_after_the_other():
    geometry = PageGeometry(slot_elements=10, slots_per_page=4)
    targets = [
        LoraTarget(0, "q", 2, 5, 6),
        LoraTarget(0, "k", 1, 5, 5),
        LoraTarget(1, "q", 1, 5, 6),
    ]
    placement = place(targets, geometry)
    assert [(spot.target.layer, spot.target.module) for spot in placement.places] == [
        (0, "k"),
        (0, "q"),
        (1, "q"),
    ]
    assert [(spot.page_index, spot.offset) for spot in placement.places] == [
        (0, 0),
        (0, 10),
        (1, 0),
    ]
    assert placement.num_pages == 2


def test_the_order_of_the_rows_does_not_matter():
    geometry = PageGeometry(slot_elements=4, slots_per_page=5)
    targets = layers({"a": (2, 2), "b": (4, 6), "c": (1, 8)}, 3, rank=2)
    assert place(targets, geometry) == place(targets[::-1], geometry)


def test_a_page_holds_one_target_of_the_largest_rank():
    targets = layers({"small": (2, 2), "large": (100, 300)}, 1)
    geometry = page_geometry(targets, usual_ranks=RankLimits(1), max_ranks=RankLimits(8))
    assert geometry == PageGeometry(slot_elements=16, slots_per_page=200)


def test_the_largest_adapter_is_counted_in_pages_not_in_elements():
    """Three of four slots are used in each page: by elements, three pages would do for four."""
    targets = layers({"q": (5, 5)}, 4)
    geometry = PageGeometry(slot_elements=10, slots_per_page=4)
    assert pages_at_ranks(targets, RankLimits(3), geometry) == 4


def test_an_adapter_of_no_targets_has_no_pages():
    assert place([], PageGeometry(4, 4)).num_pages == 0


def test_a_target_larger_than_a_page_is_refused():
    targets = layers(LLAMA_7B_QKV, 1)
    geometry = page_geometry(targets, usual_ranks=RankLimits(8), max_ranks=RankLimits(16))
    with pytest.raises(AdapterTooLargeError, match=naming("q_proj", 0, 32)):
        place([LoraTarget(0, "q_proj", 32, 4096, 4096)], geometry)


@pytest.mark.parametrize(
    ("targets", "ranks", "named"),
    [
        ([], (8, 64), ("least",)),
        (layers(LLAMA_7B_QKV, 1), (0, 64), ("usual_ranks", 1, 0)),
        (layers(LLAMA_7B_QKV, 1), (8, -1), ("max_ranks", 1, -1)),
    ],
)
def test_bad_geometry_is_a_config_error(targets, ranks, named):
    with pytest.raises(ConfigError, match=naming(*named)):
        page_geometry(targets, usual_ranks=RankLimits(ranks[0]), max_ranks=RankLimits(ranks[1]))


NO_EXPERTS = st.just({})


@st.composite
def models_and_adapters(draw, experts=NO_EXPERTS):
    sizes = st.tuples(st.integers(1, 30), st.integers(1, 30))
    shapes = draw(st.dictionaries(st.sampled_from("qkvogud"), sizes, min_size=1))
    num_layers = draw(st.integers(1, 4))
    model = layer_targets([shapes] * num_layers, num_experts=[draw(experts)] * num_layers)
    optimal_rank, max_rank = draw(st.integers(1, 8)), draw(st.integers(1, 16))
    chosen = draw(st.lists(st.sampled_from(list(each_expert(model))), unique=True))
    ranks = st.integers(1, max_rank)
    adapter = [msgspec.structs.replace(target, rank=draw(ranks)) for target in chosen]
    return model, optimal_rank, max_rank, adapter


@given(models_and_adapters())
def test_the_guarantees_hold_for_any_model(case):
    model, optimal_rank, max_rank, adapter = case
    geometry = page_geometry(
        model, usual_ranks=RankLimits(optimal_rank), max_ranks=RankLimits(max_rank)
    )
    usual = [msgspec.structs.replace(target, rank=optimal_rank) for target in model]
    usual_slots = sum(geometry.slots_of(target) for target in usual)
    num_usual_pages = place(usual, geometry).num_pages
    assert num_usual_pages == 1 or num_usual_pages * geometry.slots_per_page == usual_slots
    check_placement(adapter, model, max_rank, geometry)


@given(models_and_adapters(st.dictionaries(st.sampled_from("gud"), st.integers(2, 20))))
def test_the_guarantees_hold_with_experts(case):
    model, optimal_rank, max_rank, adapter = case
    geometry = page_geometry(
        model, usual_ranks=RankLimits(optimal_rank), max_ranks=RankLimits(max_rank)
    )
    largest = max(target.in_features + target.out_features for target in model)
    assert geometry.page_elements >= max_rank * largest
    assert geometry.slot_elements % 16 == 0
    check_placement(adapter, model, max_rank, geometry)


def check_placement(adapter, model, max_rank, geometry):
    placement = place(adapter, geometry)
    assert placement.num_pages <= pages_at_ranks(model, RankLimits(max_rank), geometry)
    assert placement.num_pages == pages_of(adapter, geometry)
    assert [spot.target for spot in placement.places] == sorted(each_expert(adapter))
    joined = list(join_experts(sorted(each_expert(adapter))))
    assert len(joined) <= len(adapter)
    assert sorted(each_expert(joined)) == sorted(each_expert(adapter))
    assert place(joined, geometry) == placement
    assert pages_of(joined, geometry) == placement.num_pages
    assert pages_of(model, geometry) == place(model, geometry).num_pages
    end = [0] * placement.num_pages
    for spot in placement.places:
        assert spot.offset == end[spot.page_index]
        assert spot.offset % geometry.slot_elements == 0
        end[spot.page_index] += geometry.slots_of(spot.target) * geometry.slot_elements
    assert all(0 < elements <= geometry.page_elements for elements in end)
