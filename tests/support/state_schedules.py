"""Random schedules of an engine that keeps states: each is an exact hash of all tokens before it.

A runner that reads another state than the plan promises ends the schedule with an AssertionError.
"""

import dataclasses
import random
from collections.abc import Iterator

import msgspec

from loraplex.core.beam_search import BeamSearch
from loraplex.core.cache import Blocks, Chunk, States
from loraplex.core.output import EngineOutput
from loraplex.core.plan import (
    NO_BLOCK,
    BlockId,
    CacheGroupCapacity,
    CacheGroupId,
    Capacity,
    RowResult,
    RowStep,
    Slot,
    StepPlan,
)
from loraplex.core.request import EngineRequest
from loraplex.core.sampling_params import SamplingParams
from loraplex.core.scheduler_settings import BatchSchedulerPolicy, SchedulerSettings
from loraplex.core.task import Generate
from loraplex.engine.engine import build_engine
from loraplex.execution.mirror import Array
from loraplex.execution.sampling.pending_samples import TokenFeed
from loraplex.execution.steps.input_batch import InputBatch, groups_of_states
from loraplex.execution.steps.tensors import DeviceTensors
from loraplex.testing.fake_clock import FakeClock
from support.delayed_accelerator import DelayedAccelerator
from support.delayed_runner import DelayedRunner
from support.fake_loader import FakeLoader
from support.fake_model import FakeModel, State
from support.fake_runner import FAKE_CAPACITY, SPOILT, FakeRow, FakeRunner
from support.fake_search import search_alone

MAX_MODEL_LEN = 60
BLOCK_SIZE = 2
NUM_PADDED = 3
"""Tokens of padding in steps that only decode."""


class StateRunner(FakeRunner):
    """Runner that reads and writes states at the places that a step is given, padding included.

    It computes the rows of every other step twice, as after a lack of memory.
    """

    def __init__(self, capacity: Capacity, model: FakeModel, loader: FakeLoader) -> None:
        super().__init__(capacity, model, loader)
        states = groups_of_states(capacity)
        assert states is not None
        self._batch = InputBatch(
            capacity.max_num_seqs,
            capacity.max_model_len,
            capacity.block_size,
            len(capacity.cache_groups),
            states=states,
        )
        self._groups = list(states)
        accelerator = DelayedAccelerator(seed=1)
        feed = TokenFeed(accelerator, capacity.max_num_seqs)
        self._tensors = DeviceTensors(accelerator, feed, capacity, NUM_PADDED)
        self._steps: dict[Slot, tuple[int, int]] = {}
        """Index and first token of each row of the step."""
        self._reads: dict[CacheGroupId, Array] = {}
        self._places: dict[CacheGroupId, Array] = {}

    def _change_rows(self, plan: StepPlan) -> None:
        super()._change_rows(plan)
        for slot in plan.removed:
            self._batch.remove_row(slot)
        for added in plan.added:
            self._batch.add_row(added)
        if plan.rows:
            self._prepare(plan)

    def _prepare(self, plan: StepPlan) -> None:
        inputs = self._batch.prepare(plan.rows)
        firsts = inputs.query_start_loc
        self._steps = {row.slot: (n, firsts[n]) for n, row in enumerate(plan.rows)}
        if inputs.wants_all_logits:
            inputs = dataclasses.replace(inputs.with_row_per_token(), num_padding=NUM_PADDED)
        _, _, *rest = self._tensors._arrays(inputs, [[1] * row.num_tokens for row in plan.rows])
        self._reads = dict(zip(self._groups, rest, strict=False))
        mappings = rest[len(self._groups) + 1 :]
        self._places = {group: mappings[group] for group in self._groups}

    def _compute(self, step: RowStep) -> RowResult:
        row, num_tokens = self._row(step), sum(r.num_tokens for r in self.plans[-1].rows)
        for group, places in self._places.items():
            for place in places[num_tokens:]:
                if place != NO_BLOCK:
                    self._kv[group][place][0] = SPOILT
        if row.failed_at is None and self._last_step_id % 2:
            states = self.model.extend(row.states[-1], step.draft_token_ids, row.adapters)
            stop = step.start + step.num_tokens
            for position, state in enumerate([*row.states, *states][step.start : stop], step.start):
                self._write(row, position, state)
            for group in range(len(self._kv)):
                self._check_block_table(row, step, group)
        return super()._compute(step)

    def _write(self, row: FakeRow, position: int, state: State) -> None:
        super()._write(row, position, state)
        index, first = self._steps[row.added.slot]
        token = first + position - self.plans[-1].rows[index].start
        for group, places in self._places.items():
            if places[token] != NO_BLOCK:
                self._store(row, group, position, int(places[token]), state)

    def _store(
        self, row: FakeRow, group: CacheGroupId, position: int, place: BlockId, state: State
    ) -> None:
        """Write the state that ends with a position."""
        del row, position
        self._kv[group][place][0] = state

    def _write_state(self, row: FakeRow, group: CacheGroupId, index: int, state: State) -> None:
        """Write nothing: a row writes at the places of the step."""

    def _state_block(self, row: FakeRow, group: CacheGroupId, index: int) -> BlockId:
        del index
        return int(self._reads[group][self._steps[row.added.slot][0]])

    def _may_defer(self, row: FakeRow, step: RowStep) -> bool:
        # A request with a grammar has a drafter, so no step is planned while its row is in flight.
        return super()._may_defer(row, step) and row.added.sampling.num_draft_tokens is None


@dataclasses.dataclass
class Tally:
    """What the schedules have had of what they are for."""

    steps: int = 0
    preemptions: int = 0
    cached_tokens: int = 0
    rejected_drafts: int = 0
    accepted_drafts: int = 0
    offloads: int = 0
    beams: int = 0
    outputs: int = 0


def random_capacity(draw: random.Random) -> Capacity:
    every = draw.choice([4, 4, 8])
    tail = Chunk(every, draw.choice([0, 1, 3]))
    specs = draw.choice(
        [
            (Blocks(), tail, States(every)),
            (Blocks(), States(every)),
            (Blocks(9), tail, States(every)),
            (tail, States(every)),
        ]
    )
    groups = tuple(
        CacheGroupCapacity(
            spec=spec,
            num_blocks=draw.randint(4, 12) if isinstance(spec, States) else draw.randint(31, 50),
            num_host_blocks=draw.choice([0, 6, 60]),
        )
        for spec in specs
    )
    return msgspec.structs.replace(
        FAKE_CAPACITY,
        block_size=BLOCK_SIZE,
        cache_groups=groups,
        max_num_seqs=draw.choice([2, 4, 6]),
        max_model_len=MAX_MODEL_LEN,
        num_stages=draw.choice([1, 1, 2]),
    )


def random_settings(draw: random.Random) -> SchedulerSettings:
    return SchedulerSettings(
        max_num_batched_tokens=draw.choice([8, 16, 40]),
        max_prefill_chunk=draw.choice([None, None, 3, 7]),
        batch_scheduler_policy=draw.choice(list(BatchSchedulerPolicy)),
        num_draft_tokens=draw.choice([2, 9]),
        max_draft_ngram=1,
        enable_prefix_cache=draw.choice([True, True, True, False]),
        state_checkpoint_tokens=draw.choice([8, 16, 800]),
    )


def random_request(
    draw: random.Random, request_id: int, now_ns: int, beam_share: float
) -> EngineRequest:
    start = draw.choice([1, 1, 2])
    prompt = [start + i // 3 % 3 for i in range(draw.choice([1, 4, 5, 8, 9, 16, 17, 25, 33]))]
    if draw.random() < 0.5:
        prompt.append(draw.randint(1, 3))
    sampling = SamplingParams(
        max_tokens=draw.choice([1, 3, 8, 20, 30]),
        n=draw.choice([1, 1, 1, 2]),
        temperature=draw.choice([0.0, 1.0]),
        ignore_eos=True,
        num_draft_tokens=draw.choice([None, None, 0]),
        seed=draw.choice([0, 1]),
    )
    if draw.random() < beam_share:
        sampling = msgspec.structs.replace(
            sampling, n=1, beam=BeamSearch(width=draw.choice([2, 3]))
        )
    return EngineRequest(
        request_id=request_id,
        prompt_token_ids=tuple(prompt),
        task=Generate(sampling),
        eos_token_ids=(0,),
        adapters=(),
        kv_salt=b"salt",
        tenant="",
        deadline_ns=None,
        arrival_ns=now_ns,
        priority=draw.choice([0, 0, 1]),
    )


class Schedule:
    """One engine with random settings, and random requests, aborts and failures."""

    def __init__(self, seed: int, beam_share: float = 0.15) -> None:
        """beam_share: of the requests."""
        self._draw = random.Random(seed)
        self._beam_share = beam_share
        self._model = FakeModel(4)
        capacity = random_capacity(self._draw)
        self._runner = StateRunner(capacity, self._model, FakeLoader(1))
        overlap = self._draw.choice([False, True])
        self._clock = FakeClock(1)
        is_delayed = overlap or capacity.num_stages > 1
        self._engine = build_engine(
            DelayedRunner(self._runner) if is_delayed else self._runner,
            FakeLoader(1),
            self._clock,
            random_settings(self._draw),
            adapter_host_bytes=1,
            overlap=overlap,
        )
        self._requests: dict[int, EngineRequest] = {}
        self._tokens: dict[tuple[int, int], list[int]] = {}
        self._aborted: set[int] = set()
        self._num_added = 0
        self.num_outputs = 0

    def run(self, num_steps: int) -> Tally:
        """Run so many steps and then to the end. Raises AssertionError if something is wrong."""
        for _ in range(num_steps):
            self._disturb()
            self._step()
        for _ in range(20 * num_steps):
            if self._engine.is_idle:
                break
            self._step()
        assert self._engine.is_idle, "a request starves"
        self._engine.check()
        stats = self._engine.stats()
        plans = self._runner.plans
        return Tally(
            stats.steps,
            stats.preemptions,
            stats.cached_tokens,
            stats.draft_tokens - stats.accepted_tokens,
            stats.accepted_tokens,
            sum(len(plan.block_offloads) for plan in plans),
            sum(row.num_candidates > 0 for plan in plans for row in plan.rows),
            self.num_outputs,
        )

    def _disturb(self) -> None:
        draw, runner = self._draw, self._runner
        chance = draw.random()
        if chance < 0.3 and len(self._requests) < 12:
            self._num_added += 1
            request = random_request(draw, self._num_added, self._clock.now_ns(), self._beam_share)
            self._requests[request.request_id] = request
            self._engine.add(request)
        elif chance < 0.33 and self._requests:
            request_id = draw.choice(sorted(self._requests))
            self._aborted.add(request_id)
            self._engine.abort(request_id)
        elif chance < 0.45:
            runner.defer_rows()
        elif chance < 0.46:
            runner.fail_rows()
        elif chance < 0.48:
            runner.fail_step(early=draw.random() < 0.5)

    def _step(self) -> None:
        outputs = self._engine.step().outputs
        assert not self._runner.violations, self._runner.violations[0]
        for output in outputs:
            self._take(output)
        self._clock.advance(1_000_000)
        if self._draw.random() < 0.05:
            self._engine.check()

    def _take(self, output: EngineOutput) -> None:
        request = self._requests[output.request_id]
        for delta in output.deltas:
            key = output.request_id, delta.index
            self._tokens.setdefault(key, []).extend(delta.token_ids)
        if not output.finished:
            return
        del self._requests[output.request_id]
        if output.error is not None or output.request_id in self._aborted:
            return
        self.num_outputs += 1
        for index, expected in self._alone(request):
            assert self._tokens[output.request_id, index] == expected, "other tokens than alone"

    def _alone(self, request: EngineRequest) -> Iterator[tuple[int, list[int]]]:
        sampling = request.sampling
        if sampling.beam is not None:
            found = search_alone(self._model, request, MAX_MODEL_LEN)
            yield 0, list(found[0].beam.token_ids)
            return
        num_left = MAX_MODEL_LEN - len(request.prompt_token_ids)
        for index in range(sampling.n):
            max_tokens = min(sampling.max_tokens or num_left, num_left)
            yield index, self._model.output(request, index, max_tokens)
