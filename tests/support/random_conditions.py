"""Random conditions under which requests run. None may change an output."""

import dataclasses
import random
from collections.abc import Sequence
from typing import Any

import msgspec

from loraplex.core.plan import Capacity
from loraplex.core.request import EngineRequest
from loraplex.core.retention import KVRetention, TokenRangeRetention
from loraplex.core.scheduler_settings import (
    Batching,
    BatchSchedulerPolicy,
    FairShare,
    SchedulerSettings,
)
from loraplex.memory.eviction import EVICTION_POLICIES
from loraplex.memory.kv_blocks import KVBlocks
from loraplex.scheduling.scheduler import RequestFactory

MAX_NUM_SEQS = 8
FAILING_FIELDS = (
    "removed",
    "added",
    "rows",
    "block_offloads",
    "block_loads",
    "block_copies",
    "adapter_copies",
)
"""Fields of a StepPlan."""


@dataclasses.dataclass(frozen=True, slots=True)
class Conditions:
    """Conditions of one schedule. The repr shows all of them."""

    seed: object
    settings: SchedulerSettings
    """See settings_for."""
    max_num_seqs: int
    kv_memory_factor: float
    """KV blocks: this times what the largest request needs."""
    num_host_blocks: int
    adapter_memory_factor: float
    """Adapter pages: this times what the largest request needs."""
    small_adapter_host: bool
    keeps_host_copy: bool
    eviction_policy: str
    overlap: bool
    num_stages: int
    """Number of plans in flight, as for a pipeline of so many stages."""
    fast_forward: bool
    """Whether texts that a grammar forces are drafted."""
    abort_share: float
    crashes: tuple[int, ...]
    """Before which steps the engine is dropped."""
    failures: tuple[tuple[str, int], ...]
    """(field, n): the n-th step fails that has something in this field of its plan."""
    has_journal: bool

    def short_of_memory(self, **changes: Any) -> "Conditions":
        """Return the same with little memory: what is preempted is computed again as a whole.

        changes: of the settings.
        """
        policy = BatchSchedulerPolicy.MAX_UTILIZATION
        settings = msgspec.structs.replace(
            self.settings, enable_prefix_cache=False, batch_scheduler_policy=policy, **changes
        )
        return dataclasses.replace(self, settings=settings, kv_memory_factor=1.0, num_host_blocks=0)

    @classmethod
    def draw(cls, seed: object) -> "Conditions":
        draws = random.Random(f"conditions {seed}")
        max_num_seqs = draws.randint(4, MAX_NUM_SEQS)
        # Draws of their own leave the others as they were.
        checkpoint_tokens = random.Random(f"checkpoints {seed}").choice([8, 16, 1024])
        return cls(
            seed=seed,
            settings=msgspec.structs.replace(
                _draw_settings(draws, max_num_seqs), state_checkpoint_tokens=checkpoint_tokens
            ),
            max_num_seqs=max_num_seqs,
            kv_memory_factor=draws.choice([1.0, 1.0, 1.2, 1.5, 4.0]),
            num_host_blocks=draws.choice([0, 8, 60]),
            adapter_memory_factor=draws.choice([1.0, 1.0, 1.5, 4.0]),
            small_adapter_host=draws.random() < 0.5,
            keeps_host_copy=draws.random() < 0.3,
            eviction_policy=draws.choice(sorted(EVICTION_POLICIES)),
            overlap=draws.random() < 0.5,
            num_stages=draws.choice([1, 1, 1, 3]),
            fast_forward=draws.random() < 0.7,
            abort_share=draws.choice([0.0, 0.0, 0.2]),
            crashes=_draw_crashes(draws),
            failures=_draw_failures(draws),
            has_journal=draws.random() < 0.25,
        )

    def capacity(
        self, capacity: Capacity, requests: Sequence[EngineRequest], least_pages: int
    ) -> Capacity:
        """Return the capacity of an engine that can serve each of the requests alone.

        least_pages: of the adapters of one request.
        """
        kv = KVBlocks(capacity.block_size, capacity.cache_groups)
        settings = self.settings_for(requests)
        factory = RequestFactory(capacity, settings)
        needs = [factory.make(request, ()).max_blocks(kv) for request in requests]
        cache_groups = tuple(
            msgspec.structs.replace(
                group,
                num_blocks=min(group.num_blocks, round(self.kv_memory_factor * max(its_needs))),
                num_host_blocks=min(group.num_host_blocks, self.num_host_blocks),
            )
            for group, its_needs in zip(
                capacity.cache_groups, zip(*needs, strict=True), strict=True
            )
        )
        return msgspec.structs.replace(
            capacity,
            cache_groups=cache_groups,
            max_num_seqs=self.max_num_seqs,
            num_stages=self.num_stages,
            num_adapter_pages=min(
                capacity.num_adapter_pages, round(self.adapter_memory_factor * least_pages)
            ),
            keeps_host_copy=self.keeps_host_copy,
        )

    def settings_for(self, requests: Sequence[EngineRequest]) -> SchedulerSettings:
        """Return settings whose limits none of these requests exceeds."""
        longest_input = max((len(request.encoder_token_ids) for request in requests), default=0)
        settings = msgspec.structs.replace(
            self.settings,
            max_num_batched_tokens=max(self.settings.max_num_batched_tokens, longest_input + 1),
        )
        limit = settings.max_seqs_per_adapter
        if not limit:
            return settings
        widths = [r.sampling.beam.width for r in requests if r.sampling.beam is not None]
        return msgspec.structs.replace(settings, max_seqs_per_adapter=max(limit, *widths, 0))

    def changed(self, request: EngineRequest) -> EngineRequest:
        """Return the request with another priority, tenant and so on, which change no output."""
        draws = random.Random(f"request {self.seed} {request.request_id}")
        sampling = request.sampling
        if draws.random() < 0.3:
            num_draft_tokens = draws.choice([None, 0, 1, 5])
            sampling = msgspec.structs.replace(sampling, num_draft_tokens=num_draft_tokens)
        return msgspec.structs.replace(
            request.with_sampling(sampling),
            priority=draws.choice([0, 0, 0, 1, -1]),
            tenant=draws.choice(["one", "two"]),
            share_weight=draws.choice([1.0, 1.0, 3.0]),
            retention=_draw_retention(draws),
        )


def _draw_settings(draws: random.Random, max_num_seqs: int) -> SchedulerSettings:
    return SchedulerSettings(
        max_num_batched_tokens=draws.choice([max_num_seqs, 17, 64, 512]),
        max_prefill_chunk=draws.choice([None, 1, 7, 64]),
        shortest_prefill_share=draws.choice([0.0, 0.5, 0.9]),
        batching=draws.choice([*Batching, Batching.INFLIGHT]),
        batch_scheduler_policy=draws.choice(
            [*BatchSchedulerPolicy, BatchSchedulerPolicy.MAX_UTILIZATION]
        ),
        fair_share=draws.choice(list(FairShare)),
        fair_resident_lead=draws.choice([0.0, 20.0, 2048.0]),
        max_seqs_per_adapter=draws.choice([0, 0, 1, 2]),
        max_queue_delay_microseconds=draws.choice([0, 0, 3]) * 1000,
        enable_prefix_cache=draws.random() < 0.6,
        num_draft_tokens=draws.choice([0, 1, 4]),
        max_draft_ngram=draws.choice([1, 3]),
        adapter_aging_seconds=draws.choice([0, 0.005, 2.0]),
        lora_ttl_seconds=draws.choice([None, None, 1.0]),
    )


def _draw_retention(draws: random.Random) -> KVRetention | None:
    if draws.random() < 0.6:
        return None
    end = draws.choice([None, 5, 16])
    of_prompt = TokenRangeRetention(
        0, end, priority=draws.choice([0, 90]), duration_ms=draws.choice([None, 0, 4])
    )
    return KVRetention((of_prompt,), decode_priority=draws.choice([5, 60]))


def _draw_crashes(draws: random.Random) -> tuple[int, ...]:
    if draws.random() < 0.5:
        return ()
    return tuple(sorted(draws.randint(1, 30) for _ in range(draws.randint(1, 3))))


def _draw_failures(draws: random.Random) -> tuple[tuple[str, int], ...]:
    if draws.random() < 0.6:
        return ()
    fields = draws.sample(FAILING_FIELDS, 2)
    return tuple((field, draws.randint(1, 15 if field == "rows" else 2)) for field in fields)
