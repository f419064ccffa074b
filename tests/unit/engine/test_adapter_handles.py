"""Pages that the engine counts for an adapter: those that the bank then fills."""

import pytest

from loraplex.core.adapter import AdapterSource, LoraTarget
from loraplex.core.errors import AdapterTooLargeError
from loraplex.core.plan import PageGeometry
from loraplex.engine.adapter_handles import AdapterHandles
from loraplex.memory.adapter_cache import AdapterCache
from loraplex.memory.adapter_pages import place
from support.fake_loader import FakeLoader

GEOMETRY = PageGeometry(slot_elements=16, slots_per_page=20)
TARGETS = (
    LoraTarget(0, "experts.down_proj", 4, 8, 8, num_experts=7),
    LoraTarget(0, "experts.up_proj", 7, 8, 8, num_experts=128),
    LoraTarget(1, "experts.up_proj", 2, 8, 8, expert=3),
)


def handles(num_pages: int) -> AdapterHandles:
    cache = AdapterCache(10**6, num_pages, keeps_host_copy=True)
    return AdapterHandles(cache, FakeLoader(), GEOMETRY)


def test_an_adapter_of_experts_has_the_pages_of_all_of_them() -> None:
    source = AdapterSource("d", "p", 100, TARGETS)
    needed = place(TARGETS, GEOMETRY).num_pages
    assert needed == 2 + 64 == len({spot.page_index for spot in place(TARGETS, GEOMETRY).places})
    assert handles(needed).register(source) == 1
    with pytest.raises(AdapterTooLargeError, match=r"66 device pages.* has 65: raise lora_device"):
        handles(needed - 1).register(source)
