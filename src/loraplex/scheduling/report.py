"""What the scheduler tells about itself: numbers of a step, and of the whole engine."""

from collections.abc import Sequence

from loraplex.core.plan import StepPlan
from loraplex.core.stats import EngineStats, StepRecord
from loraplex.scheduling.active import ActiveSequence
from loraplex.scheduling.roster import Roster


def step_record(
    roster: Roster,
    plan: StepPlan,
    sequences: Sequence[ActiveSequence],
    start_ns: int,
    num_preempted: int,
) -> StepRecord:
    """About a plan that is launched now, with the sequences of its rows."""
    return StepRecord(
        step_id=plan.step_id,
        start_ns=start_ns,
        duration_ns=0,
        num_rows=len(plan.rows),
        num_prefill_rows=sum(row.token_ids is not None for row in plan.rows),
        num_tokens=plan.num_tokens,
        num_adapters=len({h for active in sequences for h in active.request.handles}),
        num_running=len(roster.running),
        num_waiting=roster.num_waiting,
        num_preempted=num_preempted,
        blocks_held=roster.kv.num_held,
        blocks_cached=roster.kv.num_cached,
        blocks_free=roster.kv.num_free,
        adapter_pages_used=roster.adapters.stats().device_pages_used,
        adapter_copies_started=len(plan.adapter_copies),
        request_ids=tuple(active.request.request_id for active in sequences),
    )


def engine_stats(roster: Roster) -> EngineStats:
    counts, kv = roster.counts, roster.kv
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
