"""Places of ranks, and what they must have equal."""

import msgspec
import pytest

from loraplex.core.cache import Blocks
from loraplex.core.errors import ConfigError
from loraplex.core.plan import CacheGroupCapacity
from loraplex.parallel.world import World, agreed_capacity, check_traits
from support.fake_runner import FAKE_CAPACITY
from support.naming import naming


def test_ranks_are_numbered_stage_by_stage():
    worlds = (World(0, 2, 3), *World(0, 2, 3).others())
    assert [(world.rank, world.stage, world.tensor_rank) for world in worlds] == [
        (0, 0, 0),
        (1, 0, 1),
        (2, 1, 0),
        (3, 1, 1),
        (4, 2, 0),
        (5, 2, 1),
    ]
    assert [world.stage_leader for world in worlds] == [0, 0, 2, 2, 4, 4]


@pytest.mark.parametrize(
    ("theirs", "named"),
    [
        ({"torch": "2.1", "isa": "avx2"}, ("torch", 0, 2.0, 3, 2.1)),
        ({"torch": "2.0"}, ("isa", 0, "avx2", 3)),
        ({"torch": "2.0", "isa": "avx2", "gpu": "x"}, ("gpu", 0, 3, "x")),
    ],
)
def test_a_different_trait_is_named_with_both_values(theirs, named):
    with pytest.raises(ConfigError, match=naming(*named)):
        check_traits({"torch": "2.0", "isa": "avx2"}, 3, theirs)


def test_equal_traits_are_fine():
    check_traits({"torch": "2.0"}, 1, {"torch": "2.0"})


def test_the_smallest_number_of_blocks_and_pages_counts():
    larger = msgspec.structs.replace(
        FAKE_CAPACITY,
        cache_groups=(CacheGroupCapacity(num_blocks=300, num_host_blocks=4),),
        num_adapter_pages=20,
        weights_bytes=5,
    )
    smaller = msgspec.structs.replace(FAKE_CAPACITY, num_adapter_pages=15)
    agreed = agreed_capacity([larger, smaller])
    assert agreed.cache_groups == (CacheGroupCapacity(num_blocks=256),)
    assert (agreed.num_adapter_pages, agreed.weights_bytes) == (15, 5)


@pytest.mark.parametrize(
    "change",
    [
        {"block_size": 8},
        {"vocab_size": 3},
        {"cache_groups": (CacheGroupCapacity(num_blocks=256, spec=Blocks(64)),)},
        {"cache_groups": FAKE_CAPACITY.cache_groups * 2},
    ],
)
def test_ranks_that_cannot_compute_the_same_plans_are_refused(change):
    other = msgspec.structs.replace(FAKE_CAPACITY, **change)
    with pytest.raises(ConfigError, match="rank 1 has"):
        agreed_capacity([FAKE_CAPACITY, other])
