"""Requests of a model with an encoder: what they hold, when they encode, and what is refused."""

import re

import msgspec
import pytest

from loraplex.core.beam_search import BeamSearch
from loraplex.core.cache import Blocks, Cross
from loraplex.core.plan import CacheGroupCapacity, EncodeText, RowAdded, StepPlan
from loraplex.core.request import EngineRequest
from loraplex.core.sampling_params import SamplingParams
from loraplex.core.scheduler_settings import FairShare, SchedulerSettings
from loraplex.core.task import Generate
from support.engine_requests import engine_request
from support.fake_engine import FakeEngine
from support.fake_runner import FAKE_CAPACITY
from support.fake_search import search_alone
from support.naming import naming

BLOCK_SIZE = 4
CROSS = 1
INPUT = tuple(range(50, 61))
"""Three blocks."""


def fake_engine(num_blocks=40, num_cross_blocks=12, num_host_blocks=0, settings=None, **capacity):
    specs = ((Blocks(), num_blocks), (Cross(), num_cross_blocks))
    return FakeEngine(
        msgspec.structs.replace(
            FAKE_CAPACITY,
            block_size=BLOCK_SIZE,
            cache_groups=tuple(
                CacheGroupCapacity(spec=spec, num_blocks=count, num_host_blocks=num_host_blocks)
                for spec, count in specs
            ),
            **{"max_num_seqs": 4, "longest_encoder_input": 40, **capacity},
        ),
        SchedulerSettings(**{"max_num_batched_tokens": 32, **(settings or {})}),
    )


def check_outputs(fakes):
    for request_id, request in fakes.requests.items():
        expected = {i: fakes.alone(request_id, i) for i in range(request.sampling.n)}
        assert fakes.completions[request_id].token_ids == expected, request_id


def encodes(fakes):
    """Return the numbers of encodes of the plans that have some."""
    return [len(plan.encodes) for plan in fakes.runner.plans if plan.encodes]


def cross_pool(fakes):
    return fakes.engine._scheduler._state.kv.groups[CROSS].pool


def error_of(fakes, **request):
    request_id = fakes.add(**request)
    fakes.run()
    error = fakes.completions[request_id].outputs[-1].error
    return error.code, error.param, error.message


def test_messages_without_an_encoder_input_keep_their_bytes():
    plan = StepPlan(step_id=1)
    assert b"encodes" not in msgspec.msgpack.encode(plan)
    row = RowAdded(
        slot=0,
        sequence_id=1,
        task=Generate(),
        sequence_index=0,
        token_ids=(1,),
        num_prompt_tokens=1,
    )
    for message in (row, engine_request((1,))):
        assert b"encoder" not in msgspec.msgpack.encode(message)


def test_messages_carry_an_encoder_input():
    plan = StepPlan(step_id=1, encodes=(EncodeText(3),))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(plan), type=StepPlan) == plan
    request = engine_request((1,), encoder_token_ids=INPUT)
    encoded = msgspec.json.encode(request)
    assert msgspec.json.decode(encoded, type=EngineRequest) == request


def test_the_input_is_computed_with_the_first_token_and_held_whole():
    fakes = fake_engine(settings={"max_prefill_chunk": 1})
    fakes.add((1, 2), encoder_token_ids=INPUT, max_tokens=12)
    fakes.step()
    assert fakes.runner.plans[0].encodes == (EncodeText(0),)
    assert fakes.records[0].num_tokens == len(INPUT) + 1
    held = set()
    while not fakes.engine.is_idle:
        held.add(cross_pool(fakes).num_held)
        fakes.step()
    assert held == {3}
    assert encodes(fakes) == [1]
    assert fakes.engine.stats().prompt_tokens == len(INPUT) + 2
    check_outputs(fakes)


def test_sequences_of_a_request_share_what_the_first_one_encodes():
    fakes = fake_engine(num_cross_blocks=3)
    sampling = SamplingParams(n=3, max_tokens=6, temperature=1.0, seed=1)
    fakes.add((1, 2), encoder_token_ids=INPUT, sampling=sampling)
    fakes.run()
    assert encodes(fakes) == [1]
    check_outputs(fakes)


def test_beams_share_what_the_first_one_encodes():
    fakes = fake_engine(num_cross_blocks=3)
    sampling = SamplingParams(max_tokens=6, beam=BeamSearch(width=3))
    request_id = fakes.add((1, 2), encoder_token_ids=INPUT, sampling=sampling)
    fakes.run()
    assert encodes(fakes) == [1]
    (best,) = search_alone(fakes.runner.model, fakes.requests[request_id], 2048)
    assert fakes.tokens(request_id) == list(best.beam.token_ids)


@pytest.mark.parametrize(("num_host_blocks", "again"), [(0, True), (40, False)])
def test_a_recomputed_sequence_encodes_again_and_an_offloaded_one_does_not(num_host_blocks, again):
    fakes = fake_engine(num_blocks=9, num_host_blocks=num_host_blocks)
    for start in (1, 100):
        fakes.add((start, 2, 3, 4, 5), encoder_token_ids=INPUT, max_tokens=20)
    fakes.run()
    check_outputs(fakes)
    stats = fakes.engine.stats()
    assert stats.preemptions > 0
    assert (sum(encodes(fakes)) > 2) == again
    if again:  # although the decoder's own blocks are prefix hits
        assert any(row.start for plan in fakes.runner.plans if plan.encodes for row in plan.rows)


def test_equal_prompts_with_other_inputs_share_no_block():
    fakes = fake_engine()
    prompt = tuple(range(1, 14))
    for number in range(3):
        fakes.add(prompt, encoder_token_ids=(*INPUT, number % 2), max_tokens=2)
        fakes.run()
    check_outputs(fakes)
    cached = [c.outputs[-1].timing.num_cached_tokens for c in fakes.completions.values()]
    assert cached == [0, 0, 12]


def test_requests_wait_for_blocks_of_the_encoder():
    fakes = fake_engine(num_cross_blocks=7)
    for start in (1, 20, 40):
        fakes.add((start,), encoder_token_ids=INPUT, max_tokens=4)
    fakes.run()
    check_outputs(fakes)
    assert max(record.num_running for record in fakes.records) == 2
    assert fakes.engine.stats().preemptions == 0


def test_a_long_input_is_computed_while_others_decode_and_short_ones_keep_coming():
    fakes = fake_engine(num_blocks=200, num_cross_blocks=40)
    for start in range(4):
        fakes.add((start,), encoder_token_ids=(1,), max_tokens=20)
    fakes.step(3)
    longest = fakes.add((9,), encoder_token_ids=range(31), max_tokens=2)
    for start in range(12):
        fakes.add((start,), encoder_token_ids=(2, 3), max_tokens=20)
    steps = 0
    while not fakes.tokens(longest):
        fakes.step()
        steps += 1
    assert steps <= 22, "those before it have ended"
    fakes.run()
    check_outputs(fakes)


def test_steps_that_tenants_share_have_tokens_for_a_whole_input():
    settings = {"shared_step_seconds": 1e-9, "fair_share": FairShare.TENANT}
    fakes = fake_engine(settings=settings, longest_encoder_input=31)
    for tenant in ("us", "them"):
        fakes.add((1,), encoder_token_ids=range(31), tenant=tenant)
    fakes.run(40)
    check_outputs(fakes)


def test_fair_shares_are_charged_for_what_is_encoded():
    settings = {"fair_share": FairShare.TENANT, "fair_output_weight": 0.0}
    fakes = fake_engine(settings=settings)
    sampling = SamplingParams(n=2, max_tokens=3, temperature=1.0, seed=1)
    fakes.add((1, 2), encoder_token_ids=INPUT, sampling=sampling, tenant="us")
    fakes.run()
    counter = fakes.engine._scheduler._state.shares.counter(("us",))
    assert counter == len(INPUT) + 2 * 2


def test_encoder_ids_without_an_encoder_are_refused_by_name():
    fakes = FakeEngine()
    code, param, message = error_of(fakes, encoder_token_ids=INPUT)
    assert (code, param) == ("unsupported_feature", "encoder_token_ids")
    assert re.search(naming("11 tokens", "no encoder"), message)


def test_an_encoder_needs_an_input():
    code, _, message = error_of(fake_engine())
    assert code == "invalid_request"
    assert re.search(naming("no tokens"), message)


@pytest.mark.parametrize(
    ("capacity", "named"),
    [
        ({"longest_encoder_input": 9}, ("11 tokens", "at most 9")),
        ({"settings": {"max_num_batched_tokens": 11}}, ("11 tokens", "at most 10")),
        ({"num_cross_blocks": 2}, ("11 tokens", "3 KV blocks", "cross attention", "there are 2")),
    ],
)
def test_inputs_that_can_never_be_computed_are_refused(capacity, named):
    fakes = fake_engine(**capacity)
    code, _, message = error_of(fakes, encoder_token_ids=INPUT)
    assert code == "prompt_too_long"
    assert re.search(naming(*named), message)
