"""Every row reads exactly what the encoder made of its request's input, in any schedule.

The encoder is a fake: what it writes for a position is a hash of the whole input, the position and
the adapters. So is what a row must find there before it computes (FakeRunner).
"""

import dataclasses
import random
from collections import Counter
from collections.abc import Callable

import msgspec
import pytest

from loraplex.core.beam_search import BeamSearch
from loraplex.core.cache import Blocks, Cross, States
from loraplex.core.plan import CacheGroupCapacity, Capacity, StepPlan
from loraplex.core.sampling_params import SamplingParams
from loraplex.core.scheduler_settings import Batching, BatchSchedulerPolicy, SchedulerSettings
from loraplex.core.task import Pool
from loraplex.memory.cache_group import CacheGroup
from loraplex.scheduling import request as request_module
from loraplex.scheduling.admitter import Admitter
from loraplex.scheduling.plan_builder import PlanBuilder
from loraplex.scheduling.request import Request, Sequence
from loraplex.scheduling.state import SchedulerState
from support.examples import num_examples
from support.fake_engine import FakeEngine
from support.fake_model import FakeModel
from support.fake_runner import FAKE_CAPACITY
from support.fake_search import search_alone

MAX_STEPS = 3000
MAX_MODEL_LEN = 40
LONGEST_INPUT = 7
PROMPTS = [(1,), (1, 2), (1, 2, 3, 4, 5), (1, 2, 3, 4, 5, 6, 7, 8, 9, 10)]
INPUTS = [(5,), (5, 6), (6, 5), (5, 6, 5), (5, 6, 6, 5, 6), (6,) * 7, (5,) + (6,) * 6]


@dataclasses.dataclass
class Tally:
    """What happened in the schedules."""

    counts: Counter[str] = dataclasses.field(default_factory=Counter)

    def take(self, fakes: FakeEngine) -> None:
        stats, plans = fakes.engine.stats(), fakes.runner.plans
        cross = len(fakes.runner.capacity().cache_groups) - 1
        self.counts["preemptions"] += stats.preemptions
        self.counts["cached tokens"] += stats.cached_tokens
        self.counts["accepted draft tokens"] += stats.accepted_tokens
        self.counts["encodes"] += sum(len(plan.encodes) for plan in plans)
        loads = [load for plan in plans for load in plan.block_loads]
        self.counts["blocks loaded back"] += sum(load.cache_group == cross for load in loads)
        self.counts["rows that share"] += _num_sharing(plans)


def _num_sharing(plans: list[StepPlan]) -> int:
    """Return how many rows joined without an encode, after another one of their request."""
    return sum(
        added.sequence_index > 0 and added.slot not in {encode.slot for encode in plan.encodes}
        for plan in plans
        for added in plan.added
    )


def capacity_of(draws: random.Random) -> Capacity:
    block_size = draws.choice([1, 2, 4])
    num_host_blocks = draws.choice([0, 5, 60])
    others = draws.choice([(), (), (Blocks(5),), (States(2 * block_size),)])
    specs = [Blocks(), *others, Cross()]
    return msgspec.structs.replace(
        FAKE_CAPACITY,
        block_size=block_size,
        cache_groups=tuple(
            CacheGroupCapacity(
                spec=spec,
                num_host_blocks=num_host_blocks,
                num_blocks=-(-draws.randint(least, 3 * least) // block_size),
            )
            for spec in specs
            for least in [LONGEST_INPUT if isinstance(spec, Cross) else MAX_MODEL_LEN]
        ),
        max_num_seqs=draws.choice([2, 4, 6]),
        max_model_len=MAX_MODEL_LEN,
        longest_encoder_input=LONGEST_INPUT,
        num_stages=draws.choice([1, 1, 2]),
        num_adapter_pages=2,
    )


def settings_of(draws: random.Random) -> SchedulerSettings:
    policies = list(BatchSchedulerPolicy)
    return SchedulerSettings(
        batching=draws.choice([Batching.INFLIGHT, Batching.INFLIGHT, Batching.STATIC]),
        max_num_batched_tokens=draws.choice([8, 13, 40]),
        max_prefill_chunk=draws.choice([None, 1, 3]),
        enable_prefix_cache=draws.random() < 0.8,
        batch_scheduler_policy=draws.choice([BatchSchedulerPolicy.MAX_UTILIZATION, *policies]),
        num_draft_tokens=draws.choice([0, 0, 3]),
        max_draft_ngram=1,
    )


def add_request(draws: random.Random, fakes: FakeEngine) -> None:
    prompt = draws.choice(PROMPTS)
    sampling = SamplingParams(
        max_tokens=draws.choice([1, 3, 8, 14]),
        n=draws.choice([1, 1, 2, 3]),
        temperature=draws.choice([0.0, 1.0]),
        seed=draws.choice([1, 2]),
        ignore_eos=True,
        prompt_logprobs=draws.choice([None, None, None, 0]),
    )
    if draws.random() < 0.15:
        width = min(3, fakes.runner.capacity().max_num_seqs)
        sampling = msgspec.structs.replace(
            sampling, beam=BeamSearch(width=width), n=1, prompt_logprobs=None
        )
    fakes.add(
        prompt,
        *draws.choice([(), (), ("a",), ("b",)]),
        task=Pool() if draws.random() < 0.1 else None,
        sampling=sampling,
        priority=draws.choice([0, 0, 1]),
        encoder_token_ids=draws.choice(INPUTS),
    )


def run_schedule(seed: object, tally: Tally) -> None:
    """Raise an AssertionError if a row reads anything else, or an output is another one."""
    draws = random.Random(f"encoder inputs {seed}")
    capacity, settings = capacity_of(draws), settings_of(draws)
    overlap, model = draws.random() < 0.5, FakeModel(draws.choice([1000, 3]))
    fakes = FakeEngine(capacity, settings, overlap=overlap, model=model)
    for digest in ("a", "b"):
        fakes.register(digest)
    may_fail, aborted = draws.random() < 0.3, set()
    for _ in range(draws.randint(5, 25)):
        for _ in range(draws.choice([0, 1, 1, 3])):
            add_request(draws, fakes)
        if fakes.requests and draws.random() < 0.1:
            request_id = draws.choice(list(fakes.requests))
            aborted.add(request_id)
            fakes.engine.abort(request_id, draws.choice([None, 0, 1]))
        chance = draws.random()
        if chance < 0.1 and not overlap and capacity.num_stages == 1:
            fakes.runner.defer_rows()
        elif may_fail and chance < 0.15:
            fakes.runner.fail_rows()
        elif may_fail and chance < 0.2:
            fakes.runner.fail_step(early=draws.random() < 0.5)
        fakes.step(draws.randint(1, 3))
        fakes.engine.check()
    fakes.run(MAX_STEPS)
    assert all(r.num_tokens <= settings.max_num_batched_tokens for r in fakes.records)
    groups = [group.pool for group in fakes.engine._scheduler._state.kv.groups]
    assert not any(pool.num_held for pool in groups), "a block is held at the end"
    assert groups[-1].num_free == groups[-1].num_blocks, "a block of the encoder is cached"
    check_outputs(fakes, aborted)
    tally.take(fakes)


def run_schedules(count: int) -> Tally:
    tally = Tally()
    for seed in range(count):
        run_schedule(seed, tally)
    return tally


def check_outputs(fakes: FakeEngine, aborted: set[int]) -> None:
    for request_id, completion in fakes.completions.items():
        assert completion.is_finished
        request, code = fakes.requests[request_id], completion.error_code
        if code is not None:
            assert code in ("row_failed", "step_failed", "prompt_too_long")
        is_whole = code is None and request_id not in aborted
        if isinstance(request.task, Pool):
            vectors = b"".join(d.pooled for out in completion.outputs for d in out.deltas)
            assert not is_whole or vectors == fakes.runner.model.pooled(request)
        elif request.sampling.beam is not None:
            best = search_alone(fakes.runner.model, request, MAX_MODEL_LEN)[0]
            assert not is_whole or completion.token_ids[0] == list(best.beam.token_ids)
        else:
            for index in range(request.sampling.n):
                found, alone = fakes.tokens(request_id, index), fakes.alone(request_id, index)
                assert found == (alone if is_whole else alone[: len(found)]), request_id


def test_every_row_reads_its_encoder_input() -> None:
    tally = run_schedules(num_examples(2))
    assert len(+tally.counts) == 6, tally


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_every_row_reads_its_encoder_input_for_long() -> None:
    run_schedules(10_000)


def free_with_the_first_sequence(patch: pytest.MonkeyPatch) -> None:
    share = CacheGroup.share
    patch.setattr(
        CacheGroup, "share", lambda group, ids: None if group.is_of_encoder else share(group, ids)
    )


def encode_only_once(patch: pytest.MonkeyPatch) -> None:
    admit = SchedulerState.admit

    def planted(state, sequence, admission):
        admit(state, sequence, admission)
        if sequence.num_preemptions:
            sequence.input_to_encode = 0

    patch.setattr(SchedulerState, "admit", planted)


def forget_the_input_in_the_salt(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(request_module, "salt_with_input", lambda salt, _token_ids: salt)


def share_with_equal_prompts(patch: pytest.MonkeyPatch) -> None:
    """Share the table of a request whose decoder prompt is a prefix hit."""
    donors: dict[tuple[int, ...], Sequence] = {}
    donor = Request.donor.fget
    assert donor is not None

    def planted(request: Request) -> Sequence | None:
        found = donor(request)
        if found is not None:
            donors[request.engine_request.prompt_token_ids] = found
        other = donors.get(request.engine_request.prompt_token_ids)
        return other if other is not None and other.block_tables else found

    patch.setattr(Request, "donor", property(planted))


def encode_a_step_late(patch: pytest.MonkeyPatch) -> None:
    compute, late = PlanBuilder.compute, []

    def planted(builder, sequence, num_tokens, new_block_ids):
        compute(builder, sequence, num_tokens, new_block_ids)
        ready, late[:] = late[:], builder._encodes
        builder._encodes = ready

    patch.setattr(PlanBuilder, "compute", planted)


def grow_with_the_sequence(patch: pytest.MonkeyPatch) -> None:
    init = CacheGroup.__init__

    def planted(group, *arguments):
        init(group, *arguments)
        group.is_of_encoder = False

    patch.setattr(CacheGroup, "__init__", planted)


def share_in_the_same_step(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Admitter, "_awaits_encoding", lambda _admitter, _request: False)


def leave_on_the_host(patch: pytest.MonkeyPatch) -> None:
    transfers = CacheGroup.transfers
    patch.setattr(
        CacheGroup,
        "transfers",
        lambda group, *tables: () if group.is_of_encoder else transfers(group, *tables),
    )


@pytest.mark.parametrize(
    "plant",
    [
        free_with_the_first_sequence,
        encode_only_once,
        forget_the_input_in_the_salt,
        share_with_equal_prompts,
        encode_a_step_late,
        grow_with_the_sequence,
        share_in_the_same_step,
        leave_on_the_host,
    ],
)
def test_planted_bugs_are_found(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        run_schedules(num_examples(2))
