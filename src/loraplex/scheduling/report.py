"""Step records and statistics, read from the scheduler's state."""

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from loraplex.core.adapter import AdapterHandle
from loraplex.core.stats import CacheGroupStats, EngineStats, StepRecord
from loraplex.memory.kv_blocks import KVBlocks
from loraplex.scheduling.pending_steps import PendingStep
from loraplex.scheduling.state import SchedulerState

MAX_ADAPTERS = 32
"""Maximum number of adapters in one record."""


def step_record(
    state: SchedulerState, step: PendingStep, start_ns: int, digest: Callable[[AdapterHandle], str]
) -> StepRecord:
    """Return the record of an in-flight step, without its result."""
    plan, rows = step.plan, step.plan.rows
    row_adapters = [sequence.request.handles for sequence in step.sequences]
    uses = Counter(itertools.chain.from_iterable(row_adapters))
    most_used = uses.most_common(MAX_ADAPTERS) if uses else ()
    digests = {handle: digest(handle) for handle, _ in most_used}
    prefill = [row.token_ids is not None for row in rows]
    drafts = [len(row.draft_token_ids) for row in rows]
    return StepRecord(
        step_id=plan.step_id,
        start_ns=start_ns,
        duration_ns=0,
        num_rows=len(rows),
        num_prefill_rows=sum(prefill),
        num_tokens=step.num_tokens,
        num_prefill_tokens=sum(row.num_tokens for row in itertools.compress(rows, prefill)),
        num_draft_tokens=sum(drafts),
        num_added=len(plan.added),
        num_adapters=len(uses),
        adapter_rows={name: uses[handle] for handle, name in digests.items()},
        prefill_rows=_by_digest(digests, itertools.compress(row_adapters, prefill)),
        draft_rows=_by_digest(digests, itertools.compress(row_adapters, drafts)),
        num_base_rows=row_adapters.count(()),
        num_running=len(state.running),
        num_waiting=state.num_waiting,
        num_preempted=step.num_preempted,
        blocks_held=state.kv.num_held,
        blocks_cached=state.kv.num_cached,
        blocks_free=state.kv.num_free,
        block_offloads=len(plan.block_offloads),
        block_loads=len(plan.block_loads),
        block_copies=len(plan.block_copies),
        adapter_pages_used=state.adapters.cache.num_pages_used,
        adapter_copies_started=len(plan.adapter_copies),
        request_ids=tuple(sequence.request.request_id for sequence in step.sequences),
    )


def _by_digest(
    digests: Mapping[AdapterHandle, str], row_adapters: Iterable[tuple[AdapterHandle, ...]]
) -> dict[str, int]:
    """Return the number of uses in some rows; that of the base model alone has no digest."""
    rows = list(row_adapters)
    if not rows:  # as in most steps
        return {}
    counts = Counter(handle for handles in rows for handle in handles or (None,))
    base = {"": counts[None]} if None in counts else {}
    return base | {name: counts[handle] for handle, name in digests.items() if handle in counts}


def engine_stats(state: SchedulerState) -> EngineStats:
    """Return a snapshot of the counters and the pools."""
    kv, counts = state.kv, state.counts
    return EngineStats(
        num_running=len(state.running),
        num_waiting=state.num_waiting,
        blocks_held=kv.num_held,
        blocks_cached=kv.num_cached,
        blocks_free=kv.num_free,
        blocks_on_host=kv.num_on_host,
        cache_groups=_cache_groups(kv) if len(kv.groups) > 1 else (),
        adapters=state.adapters.cache.stats(),
        steps=counts.steps,
        prompt_tokens=counts.prompt_tokens,
        cached_tokens=counts.cached_tokens,
        generation_tokens=counts.generation_tokens,
        draft_tokens=counts.draft_tokens,
        accepted_tokens=counts.accepted_tokens,
        preemptions=counts.preemptions,
    )


def _cache_groups(kv: KVBlocks) -> tuple[CacheGroupStats, ...]:
    return tuple(
        CacheGroupStats(
            group.pool.num_held,
            group.pool.num_cached,
            group.host.num_held,
            group.pool.num_free,
            group.block_bytes,
        )
        for group in kv.groups
    )
