"""Pages that the engine counts for an adapter: those that the bank then fills."""

from typing import Any

import pytest

from loraplex.core.adapter import (
    EMBEDDING,
    LM_HEAD,
    OUTSIDE_LAYERS,
    AdapterSource,
    LoraTarget,
    TargetPart,
)
from loraplex.core.errors import AdapterTooLargeError
from loraplex.core.plan import PageGeometry, targets_by_stage
from loraplex.engine.engine import AdapterHandles
from loraplex.memory.adapter_cache import AdapterCache
from loraplex.memory.adapter_pages import place
from support.capacities import changed_capacity
from support.fake_loader import FakeLoader
from support.fake_runner import FAKE_CAPACITY
from support.naming import naming

GEOMETRY = PageGeometry(slot_elements=16, slots_per_page=20)
TARGETS = (
    LoraTarget(0, "experts.down_proj", 4, 8, 8, num_experts=7),
    LoraTarget(0, "experts.up_proj", 7, 8, 8, num_experts=128),
    LoraTarget(1, "experts.up_proj", 2, 8, 8, expert=3),
)


def handles(num_pages: int, **changes: Any) -> AdapterHandles:
    cache = AdapterCache(10**6, num_pages, keeps_host_copy=True)
    capacity = changed_capacity(FAKE_CAPACITY, page_geometry=GEOMETRY, **changes)
    return AdapterHandles(cache, FakeLoader(), capacity)


def test_an_adapter_of_experts_has_the_pages_of_all_of_them() -> None:
    source = AdapterSource("d", "p", 100, TARGETS)
    needed = place(TARGETS, GEOMETRY).num_pages
    assert needed == 2 + 64 == len({spot.page_index for spot in place(TARGETS, GEOMETRY).places})
    assert handles(needed).register(source) == 1
    with pytest.raises(AdapterTooLargeError, match=naming(66, 65, "lora_device_bytes")):
        handles(needed - 1).register(source)


def test_an_adapter_has_the_pages_of_the_stage_with_most_of_it() -> None:
    """An adapter on 8 layers needs pages for 5 in a pipeline of 3 + 5 layers."""
    layers = tuple(LoraTarget(layer, "q_proj", 10, 8, 8) for layer in range(8))
    head = LoraTarget(OUTSIDE_LAYERS, LM_HEAD, 10, 8, 8)
    source = AdapterSource("d", "p", 100, layers)
    per_layer = GEOMETRY.slots_of(layers[0])
    assert GEOMETRY.slots_per_page == 2 * per_layer
    assert handles(3, first_layers=(0, 3)).register(source) == 1
    with pytest.raises(AdapterTooLargeError, match=naming(3, 2, "lora_device_bytes")):
        handles(2, first_layers=(0, 3)).register(source)
    with pytest.raises(AdapterTooLargeError, match=naming(4, 3, "lora_device_bytes")):
        handles(3).register(source)
    with_head = AdapterSource("e", "p", 100, (head, *layers))
    assert handles(3, first_layers=(0, 3)).register(with_head) == 1, "it is on the last stage"


def test_what_lies_outside_the_layers_is_on_the_ends() -> None:
    embedding = LoraTarget(OUTSIDE_LAYERS, EMBEDDING, 1, 0, 8, TargetPart.EMBEDDING_A)
    head = LoraTarget(OUTSIDE_LAYERS, LM_HEAD, 1, 8, 8)
    layers = tuple(LoraTarget(layer, "q_proj", 1, 8, 8) for layer in range(4))
    everything = (embedding, head, *layers)
    assert targets_by_stage(everything, (0, 1, 3)) == [
        (embedding, layers[0]),
        (layers[1], layers[2]),
        (embedding, head, layers[3]),
    ]
    assert targets_by_stage(everything, (0,)) == [everything]
