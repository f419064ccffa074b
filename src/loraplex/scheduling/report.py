"""Step records and statistics, read from the scheduler's state."""

from loraplex.core.stats import CacheGroupStats, EngineStats, StepRecord
from loraplex.memory.kv_blocks import KVBlocks
from loraplex.scheduling.pending_steps import PendingStep
from loraplex.scheduling.state import SchedulerState


def step_record(state: SchedulerState, step: PendingStep, start_ns: int) -> StepRecord:
    """Return the record of an in-flight step, without its result."""
    plan, sequences = step.plan, step.sequences
    handles = {handle for sequence in sequences for handle in sequence.request.handles}
    return StepRecord(
        step_id=plan.step_id,
        start_ns=start_ns,
        duration_ns=0,
        num_rows=len(plan.rows),
        num_prefill_rows=sum(row.token_ids is not None for row in plan.rows),
        num_tokens=step.num_tokens,
        num_adapters=len(handles),
        num_running=len(state.running),
        num_waiting=state.num_waiting,
        num_preempted=step.num_preempted,
        blocks_held=state.kv.num_held,
        blocks_cached=state.kv.num_cached,
        blocks_free=state.kv.num_free,
        adapter_pages_used=state.adapters.stats().device_pages_used,
        adapter_copies_started=len(plan.adapter_copies),
        request_ids=tuple(sequence.request.request_id for sequence in sequences),
    )


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
        adapters=state.adapters.stats(),
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
