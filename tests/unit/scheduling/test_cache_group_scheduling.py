"""Schedules of an engine on fakes whose layers have different attention windows."""

import re

import msgspec
import pytest

from loraplex.core.beam_search import BeamSearch
from loraplex.core.cache import Blocks, Chunk
from loraplex.core.plan import CacheGroupCapacity
from loraplex.core.sampling_params import SamplingParams
from loraplex.core.scheduler_settings import BatchSchedulerPolicy, SchedulerSettings
from support.fake_engine import FakeEngine
from support.fake_model import FakeModel
from support.fake_runner import FAKE_CAPACITY
from support.fake_search import search_alone
from support.naming import naming

BLOCK_SIZE = 4
SPARE_TOKENS = {"max_num_batched_tokens": 24, "max_prefill_chunk": 7}
"""A step has tokens for three chunks."""


def fake_engine(
    *groups, settings=None, model=None, overlap=False, block_bytes=(1, 1, 1), **capacity
):
    """`groups` are (blocks, window) or (blocks, window, host blocks)."""
    cache_groups = tuple(
        CacheGroupCapacity(
            num_blocks=num_blocks,
            spec=window if isinstance(window, Chunk) else Blocks(window),
            num_host_blocks=host[0] if host else 0,
            block_bytes=num_bytes,
        )
        for (num_blocks, window, *host), num_bytes in zip(groups, block_bytes, strict=False)
    )
    vocab_size = FAKE_CAPACITY.vocab_size if model is None else model.vocab_size
    return FakeEngine(
        msgspec.structs.replace(
            FAKE_CAPACITY,
            **{"max_num_seqs": 4, "block_size": BLOCK_SIZE, "vocab_size": vocab_size, **capacity},
            cache_groups=cache_groups,
        ),
        SchedulerSettings(**{"max_num_batched_tokens": 8, **(settings or {})}),
        model=model,
        overlap=overlap,
    )


def check_outputs(fakes):
    for request_id, request in fakes.requests.items():
        expected = {i: fakes.alone(request_id, i) for i in range(request.sampling.n)}
        assert fakes.completions[request_id].token_ids == expected, request_id


def blocks_held(fakes):
    return [group.pool.num_held for group in fakes.engine._scheduler._state.kv.groups]


@pytest.mark.parametrize("overlap", [False, True])
def test_a_window_group_holds_a_few_blocks_of_a_long_output(overlap):
    fakes = fake_engine((40, None), (4, 6), overlap=overlap)
    fakes.add([1, 2, 3], max_tokens=120, eos_token_ids=())
    held = []
    while not fakes.engine.is_idle:
        fakes.step()
        fakes.engine.check()
        held.append(blocks_held(fakes))
    check_outputs(fakes)
    most_full, most_window = (max(counts) for counts in zip(*held, strict=True))
    assert most_full == 31
    assert most_window <= 3


@pytest.mark.parametrize("groups", [((9, None), (30, 8)), ((40, None), (5, 8))])
@pytest.mark.parametrize("overlap", [False, True])
def test_the_scarcest_group_decides_preemptions(groups, overlap):
    groups = [(*group, 20) for group in groups]
    fakes = fake_engine(*groups, max_num_seqs=2, overlap=overlap)
    for start in (1, 50):
        fakes.add([start, 2, 3, 4], max_tokens=24, eos_token_ids=())
    fakes.run()
    check_outputs(fakes)
    assert fakes.engine.stats().preemptions > 0
    offloads = [t for plan in fakes.runner.plans for t in plan.block_offloads]
    assert {t.cache_group for t in offloads} == {0, 1}
    assert fakes.engine.stats().blocks_on_host == 0


def test_a_request_that_one_group_can_never_hold_is_refused_with_its_layers():
    fakes = fake_engine((40, None), (3, 40))
    refused = fakes.add(range(1, 21), max_tokens=3)
    served = fakes.add(range(1, 9), max_tokens=3)
    fakes.run()
    error = fakes.completions[refused].outputs[-1].error
    assert error.code == "prompt_too_long"
    assert re.search(naming(6, "KV", 4, 40, 3), error.message)
    assert len(fakes.tokens(served)) == 3


@pytest.mark.parametrize("groups", [((12, None), (40, 6)), ((60, None), (8, 16))])
@pytest.mark.parametrize("overlap", [False, True])
def test_without_eviction_every_group_reserves_the_worst_case(groups, overlap):
    def run(policy):
        settings = {"batch_scheduler_policy": policy}
        fakes = fake_engine(*groups, settings=settings, overlap=overlap)
        for start in range(8):
            fakes.add(range(start, start + 5), max_tokens=20 if start % 2 else 3)
        fakes.run(2000)
        check_outputs(fakes)
        return fakes.engine.stats().preemptions

    assert run(BatchSchedulerPolicy.GUARANTEED_NO_EVICT) == 0
    assert run(BatchSchedulerPolicy.MAX_UTILIZATION) > 0


def test_without_eviction_a_window_group_reserves_what_its_window_needs():
    settings = {"batch_scheduler_policy": BatchSchedulerPolicy.GUARANTEED_NO_EVICT}
    fakes = fake_engine((60, None), (8, 4), settings=settings)
    for start in (1, 50, 100):
        fakes.add([start, 2, 3], max_tokens=40, eos_token_ids=())
    fakes.run()
    check_outputs(fakes)
    assert max(record.num_running for record in fakes.records) == 2, "each needs 4 of 8 blocks"


def test_prompts_that_do_not_fit_together_do_not_start_together():
    """A window makes prompts take blocks by chunks; the other group must have all of them."""
    fakes = fake_engine((25, None), (25, 8), settings=SPARE_TOKENS)
    for start in (1, 200):
        fakes.add(range(start, start + 60), max_tokens=40, eos_token_ids=())
    fakes.run()
    check_outputs(fakes)
    assert fakes.engine.stats().preemptions == 0


def test_a_later_request_finds_the_beginning_that_all_groups_still_have():
    fakes = fake_engine((40, None), (10, 8))
    first = fakes.add(range(1, 30), max_tokens=5, eos_token_ids=())
    fakes.run()
    prompt = [*range(1, 30), *fakes.tokens(first), 7, 8]
    second = fakes.add(prompt, max_tokens=5)
    fakes.run()
    check_outputs(fakes)
    assert fakes.completions[second].outputs[-1].timing.num_cached_tokens == 32
    fakes.add(range(500, 536), max_tokens=5)  # takes the blocks of the window group
    fakes.run()
    again = fakes.add(prompt, max_tokens=5)
    fakes.run()
    check_outputs(fakes)
    assert fakes.completions[again].outputs[-1].timing.num_cached_tokens < 32


@pytest.mark.parametrize(
    "groups", [((84, None), (15, 30)), ((64, None), (13, 3)), ((24, None), (60, 6))]
)
@pytest.mark.parametrize("overlap", [False, True])
def test_beams_copy_a_shared_block_in_every_group(groups, overlap):
    model = FakeModel(8)
    fakes = fake_engine(*groups, model=model, overlap=overlap, max_num_seqs=8)
    sampling = SamplingParams(
        max_tokens=14, n=3, temperature=0.0, beam=BeamSearch(width=3), ignore_eos=True
    )
    request_id = fakes.add([1, 2, 3, 4, 5, 6], sampling=sampling)
    for token_id in (3, 4, 5):
        fakes.add([token_id] * 5, max_tokens=30, eos_token_ids=())
    fakes.run()
    copies = [copy for plan in fakes.runner.plans for copy in plan.block_copies]
    assert {copy.cache_group for copy in copies} == {0, 1}
    expected = search_alone(model, fakes.requests[request_id], FAKE_CAPACITY.max_model_len)
    assert [fakes.tokens(request_id, i) for i in range(3)] == [
        list(h.beam.token_ids) for h in expected
    ]


@pytest.mark.parametrize("num_window", range(4, 9))
def test_draft_tokens_take_only_what_every_group_has_to_spare(num_window):
    fakes = fake_engine(
        (40, None),
        (num_window, 3),
        settings={"num_draft_tokens": 4},
        model=FakeModel(vocab_size=2),
    )
    for start in (0, 1):
        fakes.add([start, 1, 0], max_tokens=20, eos_token_ids=())
    fakes.run()
    check_outputs(fakes)
    assert fakes.engine.stats().accepted_tokens > 0


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("chunk", [Chunk(8), Chunk(6, 3)], ids=["aligned", "with some in front"])
def test_a_chunk_group_holds_the_blocks_of_one_chunk(chunk, overlap):
    fakes = fake_engine((40, None), (6, chunk), overlap=overlap)
    fakes.add([1, 2, 3], max_tokens=120, eos_token_ids=())
    held = []
    while not fakes.engine.is_idle:
        fakes.step()
        fakes.engine.check()
        held.append(blocks_held(fakes)[1])
    check_outputs(fakes)
    assert 1 < max(held) <= 5
    # At a border the last block stays, and one that the next plan has taken already.
    assert sum(num_held <= 1 + overlap for num_held in held) > 5


def test_a_hit_in_a_chunk_group_needs_the_blocks_since_the_border():
    fakes = fake_engine((40, None), (8, Chunk(16)))
    prompt = list(range(100, 130))
    fakes.add(prompt, max_tokens=2, eos_token_ids=())
    fakes.run()
    # The blocks of the first chunk, which are needed no more, are evicted first.
    fakes.add(range(200, 216), max_tokens=1, eos_token_ids=())
    fakes.run()
    again = fakes.add(prompt, max_tokens=2, eos_token_ids=())
    fakes.run()
    check_outputs(fakes)
    assert fakes.completions[again].outputs[-1].timing.num_cached_tokens == 28


def test_statistics_count_each_group_and_all_together():
    fakes = fake_engine((40, None), (10, 6))
    fakes.add([1, 2, 3], max_tokens=40, eos_token_ids=())
    fakes.step(30)
    stats = fakes.engine.stats()
    assert [group.held for group in stats.cache_groups] == blocks_held(fakes)
    assert stats.blocks_held == sum(blocks_held(fakes))
    assert stats.blocks_cached == sum(group.cached for group in stats.cache_groups) > 0
    assert fake_engine((40, None)).engine.stats().cache_groups == ()


def test_the_share_of_the_kv_cache_in_use_counts_bytes():
    fakes = fake_engine((40, None), (10, 6), block_bytes=(7, 100))
    fakes.add([1, 2, 3], max_tokens=40, eos_token_ids=())
    fakes.step(20)
    stats, (num_full, num_window) = fakes.engine.stats(), blocks_held(fakes)
    assert num_full > num_window > 0
    assert stats.kv_usage == (7 * num_full + 100 * num_window) / (7 * 40 + 100 * 10)


def test_a_request_starts_as_soon_as_the_group_that_was_short_has_blocks():
    """Meanwhile the long prompt of another request takes blocks of the other group."""
    fakes = fake_engine((60, 200), (12, 16), settings=SPARE_TOKENS)
    short = fakes.add(range(200, 216), max_tokens=15, eos_token_ids=())
    fakes.step(3)
    long = fakes.add(range(1, 150), max_tokens=9, eos_token_ids=())
    fakes.step(3)
    waits = fakes.add(range(300, 308), max_tokens=3, eos_token_ids=())
    fakes.run()
    check_outputs(fakes)
    first_steps, last_steps = (
        {
            request_id: [i for i, r in enumerate(fakes.records) if request_id in r.request_ids][end]
            for request_id in (short, long, waits)
        }
        for end in (0, -1)
    )
    assert first_steps[waits] == last_steps[short] + 1 < last_steps[long]
