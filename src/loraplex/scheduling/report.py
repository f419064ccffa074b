"""What the scheduler's state looks like from outside: records of steps, and statistics."""

from loraplex.core.stats import EngineStats, StepRecord
from loraplex.scheduling.flights import Flight
from loraplex.scheduling.roster import Roster


def step_record(roster: Roster, flight: Flight, start_ns: int) -> StepRecord:
    """About a plan in flight. How it ends is not known yet."""
    plan, sequences = flight.plan, flight.sequences
    handles = {handle for active in sequences for handle in active.request.handles}
    return StepRecord(
        step_id=plan.step_id,
        start_ns=start_ns,
        duration_ns=0,
        num_rows=len(plan.rows),
        num_prefill_rows=sum(row.token_ids is not None for row in plan.rows),
        num_tokens=plan.num_tokens,
        num_adapters=len(handles),
        num_running=len(roster.running),
        num_waiting=roster.num_waiting,
        num_preempted=flight.num_preempted,
        blocks_held=roster.kv.num_held,
        blocks_cached=roster.kv.num_cached,
        blocks_free=roster.kv.num_free,
        adapter_pages_used=roster.adapters.stats().device_pages_used,
        adapter_copies_started=len(plan.adapter_copies),
        request_ids=tuple(active.request.request_id for active in sequences),
    )


def engine_stats(roster: Roster) -> EngineStats:
    kv, counts = roster.kv, roster.counts
    return EngineStats(
        num_running=len(roster.running),
        num_waiting=roster.num_waiting,
        blocks_held=kv.num_held,
        blocks_cached=kv.num_cached,
        blocks_free=kv.num_free,
        blocks_on_host=kv.num_host_blocks - kv.num_host_free,
        adapters=roster.adapters.stats(),
        steps=counts.steps,
        prompt_tokens=counts.prompt_tokens,
        cached_tokens=counts.cached_tokens,
        generation_tokens=counts.generation_tokens,
        draft_tokens=counts.draft_tokens,
        accepted_tokens=counts.accepted_tokens,
        preemptions=counts.preemptions,
    )
