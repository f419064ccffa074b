"""Histograms that travel with the statistics."""

import pytest

from loraplex.core.config import SETTINGS
from loraplex.core.stats import LOAD_SECONDS_BOUNDS, Durations, EngineStats
from loraplex.memory.eviction import EVICTION_POLICIES


@pytest.mark.parametrize(
    ("seconds", "bucket"), [(0.0, 0), (0.0005, 0), (0.0006, 1), (30.0, 14), (30.1, 15)]
)
def test_a_bucket_takes_what_is_not_longer_than_its_bound(seconds, bucket):
    times = Durations().with_one(round(seconds * 1e9))
    assert times.counts[bucket] == sum(times.counts) == 1
    assert times.total_ns == round(seconds * 1e9)
    assert len(times.counts) == len(LOAD_SECONDS_BOUNDS) + 1


def test_every_eviction_policy_has_a_setting():
    assert SETTINGS["lora_eviction_policy"].choices == tuple(EVICTION_POLICIES)


def test_the_share_of_kv_blocks_that_sequences_hold():
    assert EngineStats().kv_usage == 0
    assert EngineStats(blocks_held=3, blocks_cached=2, blocks_free=7).kv_usage == 0.25
