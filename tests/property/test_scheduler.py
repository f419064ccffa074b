"""Random arrivals, aborts and failures on tiny pools: every request ends once, correctly."""

import dataclasses
import random
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import HealthCheck
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from loraplex.core.adapter import AdapterUse
from loraplex.core.beam_search import BeamSearch, EarlyStopping
from loraplex.core.cache import Blocks, Chunk, Cross, States
from loraplex.core.output import EngineOutput, FinishReason
from loraplex.core.plan import CacheGroupCapacity, Capacity
from loraplex.core.request import EngineRequest
from loraplex.core.sampling_params import SamplingParams
from loraplex.core.scheduler_settings import (
    Batching,
    BatchSchedulerPolicy,
    FairShare,
    SchedulerSettings,
)
from loraplex.core.task import Generate, Pool, PoolKind, Task
from loraplex.engine.engine import Engine, build_engine
from loraplex.engine.journal import JournalEntry
from loraplex.engine.journal_file import JournalLine
from loraplex.engine.replay import replay
from loraplex.memory.kv_salt import kv_salt
from loraplex.testing.fake_clock import FakeClock
from support.delayed_runner import DelayedRunner
from support.examples import examples
from support.fake_loader import FakeLoader, fake_source
from support.fake_model import FakeModel
from support.fake_runner import FAKE_CAPACITY, FakeRunner, fake_logprob
from support.fake_search import search_alone

MS = 1_000_000
EOS = 0
VOCAB_SIZE = 40
MAX_MODEL_LEN = 28
PAGES = {"a": 1, "b": 1, "c": 2, "d": 1, "e": 2}
"""Device pages of each adapter, by its digest."""
HOST_BYTES = {"a": 10, "b": 20, "c": 30, "d": 20, "e": 10}
ADAPTER_SETS = [
    (), (), (), (), (), ("a",), ("a",), ("b",), ("c",), ("d",), ("e",), ("a", "b"), ("b", "a"),
    ("c", "d"), ("a", "c"), ("a", "a"), ("nobody's",),
]  # fmt: skip

WINDOWS = [
    (None,), (None,), (None,), (5,), (12,), (None, 5), (None, 12), (12, 3), (None, 9, 2),
]  # fmt: skip
"""Attention windows of the cache groups; all but the first may read chunks instead."""


@st.composite
def cache_groups(draw, block_size: int) -> tuple[CacheGroupCapacity, ...]:
    num_sink_tokens = draw(st.sampled_from([0, 2]))
    chunk = draw(st.none() | st.none() | st.builds(Chunk, st.integers(1, 8), st.integers(0, 2)))
    groups = [
        CacheGroupCapacity(
            num_blocks=draw(st.integers(24, 44)) // block_size,
            num_host_blocks=draw(st.sampled_from([0, 4, 40])),
            spec=chunk if chunk and number else Blocks(window, num_sink_tokens),
        )
        for number, window in enumerate(draw(st.sampled_from(WINDOWS)))
    ]
    if draw(st.sampled_from([False, False, True])):
        states = CacheGroupCapacity(
            num_blocks=draw(st.integers(6, 20)),
            num_host_blocks=draw(st.sampled_from([0, 2, 20])),
            spec=States(block_size * draw(st.sampled_from([1, 2]))),
        )
        groups.append(states)
    return tuple(groups)


@st.composite
def with_encoder(draw, capacity: Capacity) -> Capacity:
    cross = CacheGroupCapacity(
        spec=Cross(),
        num_blocks=draw(st.integers(4, 16)) // capacity.block_size,
        num_host_blocks=draw(st.sampled_from([0, 4, 40])),
    )
    return msgspec.structs.replace(
        capacity,
        cache_groups=(*capacity.cache_groups, cross),
        longest_encoder_input=draw(st.integers(3, 8)),
    )


@st.composite
def capacities(draw, **values: Any) -> Capacity:
    block_size = draw(st.sampled_from([1, 2, 3, 4]))
    changes = {name: draw(strategy) for name, strategy in values.items()}
    return msgspec.structs.replace(
        FAKE_CAPACITY, block_size=block_size, cache_groups=draw(cache_groups(block_size)), **changes
    )


decoders = capacities(
    max_num_seqs=st.sampled_from([1, 2, 4, 6, 8]),
    num_stages=st.sampled_from([1, 1, 2, 3]),
    max_model_len=st.just(MAX_MODEL_LEN),
    pool_kinds=st.just(tuple(PoolKind)),
    vocab_size=st.just(VOCAB_SIZE),
    num_adapter_pages=st.integers(2, 4),
    keeps_host_copy=st.booleans(),
)
any_capacity = decoders | decoders.flatmap(with_encoder)
scheduler_settings = st.builds(
    SchedulerSettings,
    max_num_batched_tokens=st.integers(8, 16),
    max_prefill_chunk=st.none() | st.integers(1, 5),
    shortest_prefill_share=st.sampled_from([0.5, 0.0, 0.9]),
    batching=st.sampled_from([Batching.INFLIGHT, Batching.INFLIGHT, Batching.STATIC]),
    batch_scheduler_policy=st.sampled_from(BatchSchedulerPolicy),
    fair_share=st.sampled_from(FairShare),
    fair_output_weight=st.sampled_from([2.0, 0.0]),
    max_seqs_per_adapter=st.sampled_from([0, 0, 1, 3]),
    max_queue_size=st.sampled_from([0, 0, 3]),
    max_queue_delay_microseconds=st.sampled_from([0, 0, 5000]),
    enable_prefix_cache=st.sampled_from([True, True, False]),
    adapter_aging_seconds=st.sampled_from([0.0, 0.004, 1.0]),
    num_draft_tokens=st.sampled_from([0, 0, 2, 5]),
    state_checkpoint_tokens=st.sampled_from([24, 48]),
    max_draft_ngram=st.sampled_from([1, 3]),
)


@dataclasses.dataclass
class Wish:
    """What a request may look like. Made from one number: that is quick to draw."""

    prompt: tuple[int, ...]
    encoder_input: tuple[int, ...]
    """Empty for a model without an encoder: then it is not sent."""
    task: Task
    digests: tuple[str, ...]
    scale: float
    priority: int
    tenant: str
    share_weight: float
    timeout_ms: int | None


def wish(seed: int) -> Wish:
    choice = random.Random(seed).choice
    # Few different prompts, so that their beginnings meet in the prefix cache.
    start, length = choice([1, 1, 1, 20]), choice([1, 2, 3, 5, 8, 9, 12, 14])
    max_tokens = choice([1, 2, 6, 9, 12, 12])
    sampling = SamplingParams(
        max_tokens=max_tokens,
        min_tokens=min(choice([0, 0, 2]), max_tokens),
        n=choice([1, 1, 1, 2, 3]),
        temperature=choice([0.0, 1.0]),
        seed=choice([0, 1, 2]),
        stop_token_ids=choice([(), (), (5, 6, 7)]),
        ignore_eos=choice([True, False]),
        logprobs=choice([None, None, 1]),
        prompt_logprobs=choice([None, None, None, 0]),
        stop_token_sequences=choice([(), (), ((1, 2), (3, 3))]),
        num_draft_tokens=choice([None, None, 0, 3]),
    )
    if choice([False] * 5 + [True]):
        beam = BeamSearch(
            width=choice([1, 2, 3]),
            length_penalty=choice([1.0, 0.0, -1.0]),
            early_stopping=choice(list(EarlyStopping)),
        )
        n = min(sampling.n, beam.width)
        sampling = msgspec.structs.replace(sampling, beam=beam, n=n)
    pools = [Pool(), Pool(dimensions=4), Pool(PoolKind.MEAN), Pool(PoolKind.CLS)]
    pools += [
        Pool(PoolKind.SCORE, normalize=False),
        Pool(PoolKind.LOGITS, normalize=False, token_ids=(1, 0)),
    ]
    task = choice([Generate(sampling)] * 6 + pools)
    if isinstance(task, Pool):
        length = choice([length, length, MAX_MODEL_LEN])
    return Wish(
        prompt=tuple(start + 7 * i % 5 for i in range(length)),
        task=task,
        digests=choice(ADAPTER_SETS),
        scale=choice([1.0, 1.0, 0.5]),
        priority=choice([0, 0, 0, 1]),
        tenant=choice(["us", "us", "them"]),
        share_weight=choice([1.0, 1.0, 2.5]),
        timeout_ms=choice([None] * 7 + [0, 20, 60]),
        encoder_input=tuple(choice([1, 2]) for _ in range(choice([1, 2, 3, 3, 5, 6]))),
    )


wishes = st.builds(wish, st.integers(0, 10**6))


@dataclasses.dataclass
class Sent:
    """A request, and what has come back for it."""

    request: EngineRequest
    tokens: dict[int, list[int]]
    reasons: dict[int, FinishReason]
    aborted: set[int] = dataclasses.field(default_factory=set)
    prompt_logprobs: list[tuple] = dataclasses.field(default_factory=list)
    last: EngineOutput | None = None
    pooled: bytes = b""

    @property
    def is_pooled(self) -> bool:
        return isinstance(self.request.task, Pool)


class ListJournal:
    """A journal in memory, as a file would give it back."""

    def __init__(self):
        self.lines: list[bytes] = []

    def begin(self, header):
        self.header = header

    def write(self, entry):
        self.lines.append(msgspec.json.encode(entry))

    def close(self): ...

    def check(self):
        """Its inputs lead to its plans again."""
        decoded = (msgspec.json.decode(line, type=JournalEntry) for line in self.lines)
        lines = (JournalLine(Path(), i, 0, entry) for i, entry in enumerate(decoded))
        assert replay(self.header, lines, check_every=10**9).difference is None


class EngineMachine(RuleBasedStateMachine):
    engine: Engine

    @initialize(
        capacity=any_capacity,
        scheduling=scheduler_settings,
        host_bytes=st.sampled_from([30, 40, 60, 1000]),
        num_polls=st.integers(1, 3),
        copy_steps=st.integers(0, 2),
        eos_rate=st.sampled_from([0.0, 0.1]),
        may_fail=st.booleans(),
        overlap=st.booleans(),
        may_log=st.sampled_from([False, False, True]),
        num_tokens_used=st.sampled_from([VOCAB_SIZE, 5]),
    )
    def build(
        self,
        capacity,
        scheduling,
        host_bytes,
        num_polls,
        copy_steps,
        eos_rate,
        may_fail,
        overlap,
        may_log,
        num_tokens_used,
    ):
        self.capacity = capacity
        self.has_encoder = capacity.longest_encoder_input > 0
        self.settings = scheduling
        self.model = FakeModel(num_tokens_used, EOS, eos_rate)
        self.loader = FakeLoader(num_polls)
        self.runner = FakeRunner(capacity, self.model, self.loader, copy_steps=copy_steps)
        self.clock = FakeClock(1)
        self.journal = ListJournal() if may_log else None
        self.engine = build_engine(
            DelayedRunner(self.runner) if overlap or capacity.num_stages > 1 else self.runner,
            self.loader,
            self.clock,
            scheduling,
            adapter_host_bytes=host_bytes,
            journal=self.journal,
            overlap=overlap,
        )
        for digest, num_pages in PAGES.items():
            num_bytes = HOST_BYTES[digest]
            geometry = capacity.page_geometry
            source = fake_source(digest, geometry, num_pages=num_pages, num_bytes=num_bytes)
            self.engine.register_adapter(source)
        self.sent: dict[int, Sent] = {}
        self.may_fail = may_fail
        self.injected: set[str] = set()

    # ---- what may happen ----------------------------------------------------------------------

    @rule(wishes=st.lists(wishes, min_size=4, max_size=12))
    def add(self, wishes):
        for wish in wishes:
            request_id = len(self.sent) + 1
            now_ns = self.clock.now_ns()
            timeout_ms = wish.timeout_ms
            request = EngineRequest(
                request_id=request_id,
                prompt_token_ids=wish.prompt,
                encoder_token_ids=wish.encoder_input if self.has_encoder else (),
                task=wish.task,
                eos_token_ids=(EOS,),
                adapters=tuple(AdapterUse(digest, wish.scale) for digest in wish.digests),
                kv_salt=kv_salt(
                    "fake", "none", tuple((d, wish.scale) for d in wish.digests), wish.tenant
                ),
                tenant=wish.tenant,
                share_weight=wish.share_weight,
                priority=wish.priority,
                arrival_ns=now_ns,
                deadline_ns=None if timeout_ms is None else now_ns + timeout_ms * MS,
            )
            num_sequences = 1 if isinstance(wish.task, Pool) else wish.task.sampling.n
            self.sent[request_id] = Sent(request, {i: [] for i in range(num_sequences)}, {})
            self.engine.add(request)

    @precondition(lambda self: self.unfinished())
    @rule(data=st.data())
    def abort(self, data):
        sent = data.draw(st.sampled_from(self.unfinished()))
        sent.aborted.update(sent.tokens)
        self.engine.abort(sent.request.request_id)

    @precondition(lambda self: self.unfinished())
    @rule(data=st.data())
    def abort_sequence(self, data):
        sent = data.draw(st.sampled_from(self.unfinished()))
        index = data.draw(st.sampled_from(sorted(sent.tokens)))
        # One beam is nothing without the others.
        is_search = not sent.is_pooled and sent.request.sampling.beam is not None
        sent.aborted.update(sent.tokens if is_search else [index])
        self.engine.abort(sent.request.request_id, index)

    @rule()
    def abort_what_is_gone(self):
        self.engine.abort(10**6)

    @precondition(lambda self: self.may_fail)
    @rule(digest=st.sampled_from(sorted(PAGES)))
    def fail_load(self, digest):
        self.injected.add("adapter_load_failed")
        self.loader.fail(digest)

    @precondition(lambda self: self.may_fail)
    @rule()
    def fail_copy(self):
        self.injected.add("adapter_load_failed")
        self.runner.fail_copies()

    @precondition(lambda self: self.may_fail)
    @rule()
    def fail_row(self):
        self.injected.add("row_failed")
        self.runner.fail_rows()

    @precondition(lambda self: self.may_fail)
    @rule(early=st.booleans())
    def fail_step(self, early):
        self.injected.add("step_failed")
        self.runner.fail_step(early=early)

    @rule(digest=st.sampled_from(sorted(PAGES)))
    def preload(self, digest):
        self.engine.preload(digest)

    @rule(milliseconds=st.sampled_from([1, 5, 10, 1500]))
    def time_passes(self, milliseconds):
        self.clock.advance(milliseconds * MS)

    @rule(num_steps=st.integers(1, 12))
    def steps(self, num_steps):
        for _ in range(num_steps):
            self.step()

    # ---- what must hold -----------------------------------------------------------------------

    @invariant()
    def check(self):
        self.engine.check()
        assert not self.runner.violations
        running = self.engine.adapter_activity().running
        limit = self.settings.max_seqs_per_adapter
        assert not limit or all(number <= limit for number in running.values())

    def teardown(self):
        """Check at rest that every request has ended, and that all resources are free."""
        if not hasattr(self, "engine"):
            return
        for _ in range(self.bound()):
            if self.engine.is_idle:
                break
            wake_ns = self.engine.next_wake_ns()
            assert wake_ns is not None, "the engine sleeps while requests wait"
            self.clock.advance(max(0, wake_ns - self.clock.now_ns()))
            self.step()
            self.check()
        assert self.engine.is_idle, "a request starves"
        assert not self.unfinished()
        stats = self.engine.stats()
        num_blocks = sum(group.num_blocks for group in self.capacity.cache_groups)
        assert stats.blocks_cached + stats.blocks_free == num_blocks
        assert stats.num_running == stats.num_waiting == 0
        if self.journal is not None:
            self.journal.check()

    def bound(self) -> int:
        """Turns in which everything must end: each does something, or time passes."""
        tokens = sum(
            (1 if sent.is_pooled else sent.request.sampling.num_sequences)
            * (len(sent.request.prompt_token_ids) + 12)
            for sent in self.sent.values()
        )
        return 100 + 6 * tokens + 20 * len(self.sent)

    def unfinished(self) -> list[Sent]:
        return [sent for sent in self.sent.values() if sent.last is None]

    def step(self):
        turn = self.engine.step()
        assert not self.runner.violations
        for output in turn.outputs:
            self.take(output)
        self.clock.advance(MS)
        if turn.record is not None:
            assert turn.record.num_tokens <= self.settings.max_num_batched_tokens
            assert turn.record.num_rows <= self.capacity.max_num_seqs

    def take(self, output: EngineOutput):
        sent = self.sent[output.request_id]
        assert sent.last is None, "an output after the last one"
        if output.prompt_logprobs is not None:
            sent.prompt_logprobs.append(output.prompt_logprobs)
        for delta in output.deltas:
            assert delta.index not in sent.reasons, "a delta after the last one"
            sent.tokens[delta.index].extend(delta.token_ids)
            sent.pooled += delta.pooled
            if sent.is_pooled:
                assert not delta.token_ids
            elif sent.request.sampling.beam is not None:
                assert not delta.token_ids or delta.finish_reason is not None
            elif sent.request.sampling.logprobs is not None:
                assert delta.logprobs == tuple(fake_logprob(t, 1) for t in delta.token_ids)
            if delta.finish_reason is not None:
                sent.reasons[delta.index] = delta.finish_reason
        if output.finished:
            sent.last = output
            self.check_end(sent, output)

    def check_end(self, sent: Sent, output: EngineOutput):
        assert output.timing is not None
        if output.error is not None:
            self.check_error(sent, output.error.code)
        else:
            assert sent.reasons.keys() == sent.tokens.keys(), "a sequence did not end"
            self.check_prompt_logprobs(sent)
        if sent.is_pooled:
            ends_well = output.error is None and not sent.aborted
            assert sent.pooled == (self.model.pooled(sent.request) if ends_well else b"")
            return
        for index, tokens in sent.tokens.items():
            expected, reason = self.alone(sent.request, index)
            if sent.reasons.get(index) in (None, FinishReason.ABORT):
                assert output.error is not None or index in sent.aborted
                assert tokens == expected[: len(tokens)]
            else:
                assert (tokens, sent.reasons[index]) == (expected, reason)

    def check_prompt_logprobs(self, sent: Sent):
        prompt = sent.request.prompt_token_ids
        if sent.is_pooled or sent.request.sampling.prompt_logprobs is None:
            assert not sent.prompt_logprobs
        elif any(sent.tokens.values()):
            expected = (None, *(fake_logprob(token_id) for token_id in prompt[1:]))
            assert sent.prompt_logprobs == [expected]

    def check_error(self, sent: Sent, code: str):
        request = sent.request
        digests = {use.digest for use in request.adapters}
        possible = set(self.injected)
        if request.deadline_ns is not None and request.deadline_ns <= self.clock.now_ns():
            possible.add("deadline_exceeded")
        if self.settings.max_queue_size:
            possible.add("queue_full")
        if "nobody's" in digests:
            possible = {"adapter_not_found"}
        elif sum(PAGES[digest] for digest in digests) > self.capacity.num_adapter_pages:
            possible = {"adapter_too_large"}
        else:
            num_tokens = len(request.prompt_token_ids)
            if not sent.is_pooled:
                num_tokens += request.sampling.max_tokens - 1
            elif request.task.kind.needs_whole_prompt:
                is_long = num_tokens > self.settings.max_num_batched_tokens
                possible |= {"prompt_too_long"} if is_long else set()
            groups = self.capacity.cache_groups
            num_blocks = min(g.num_blocks for g in groups if not isinstance(g.spec, Cross))
            if num_tokens > num_blocks * self.capacity.block_size:
                possible.add("prompt_too_long")
            if self.has_encoder and len(request.encoder_token_ids) > self.longest_input(sent):
                possible.add("prompt_too_long")
            if not sent.is_pooled and request.sampling.beam is not None:
                possible |= {"prompt_too_long", "invalid_parameter"}
        assert code in possible

    def longest_input(self, sent: Sent) -> int:
        is_whole = sent.is_pooled and sent.request.task.kind.needs_whole_prompt
        num_first = len(sent.request.prompt_token_ids) if is_whole else 1
        num_left = self.settings.max_num_batched_tokens - num_first
        num_blocks = self.capacity.cache_groups[-1].num_blocks
        num_fitting = num_blocks * self.capacity.block_size
        return min(self.capacity.longest_encoder_input, num_left, num_fitting)

    def alone(self, request: EngineRequest, index: int) -> tuple[list[int], FinishReason]:
        """Return the completion of a lone request, by the rules of sampling_params."""
        sampling = request.sampling
        if sampling.beam is not None:
            return self.searched(request, index)
        num_left = MAX_MODEL_LEN - len(request.prompt_token_ids)
        max_tokens = min(sampling.max_tokens, num_left)
        stops = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else (EOS,))}
        output = self.model.output(request, index, max_tokens)
        for num_before, token_id in enumerate(output):
            if token_id in stops and num_before >= sampling.min_tokens:
                return output[: num_before + 1], FinishReason.STOP
            last = tuple(output[max(0, num_before - 1) : num_before + 1])
            if last in sampling.stop_token_sequences:
                return output[: num_before + 1], FinishReason.STOP
        return output, FinishReason.LENGTH

    def searched(self, request: EngineRequest, index: int) -> tuple[list[int], FinishReason]:
        hypotheses = search_alone(self.model, request, MAX_MODEL_LEN)
        if index >= len(hypotheses):
            return [], FinishReason.ERROR
        return list(hypotheses[index].beam.token_ids), hypotheses[index].stop.reason


@pytest.mark.timeout(0)  # its examples and their steps bound it; a failure is shrunk for minutes
def test_every_request_ends_once_with_its_output():
    run_state_machine_as_test(
        EngineMachine,
        settings=examples(2, stateful_step_count=20, suppress_health_check=list(HealthCheck)),
    )
