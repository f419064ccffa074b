"""Records of steps for the iteration log: batch, memory and times."""

from collections import Counter
from collections.abc import Iterator

import msgspec

from loraplex.core.adapter import AdapterHandle
from loraplex.core.plan import StepPlan, StepResult
from loraplex.core.stats import StepRecord
from loraplex.engine.adapter_handles import AdapterHandles

MAX_ADAPTERS = 32
"""Maximum number of adapters in one record."""


def launched_record(
    record: StepRecord,
    plan: StepPlan,
    adapter_rows: Counter[AdapterHandle],
    adapters: AdapterHandles,
) -> StepRecord:
    """Return the scheduler's record of a step, completed from its plan."""
    prefill = [row.num_tokens for row in plan.rows if row.token_ids is not None]
    return msgspec.structs.replace(
        record,
        num_prefill_tokens=sum(prefill),
        num_draft_tokens=sum(len(row.draft_token_ids) for row in plan.rows),
        num_added=len(plan.added),
        adapter_rows={
            adapters.digest(handle): count
            for handle, count in adapter_rows.most_common(MAX_ADAPTERS)
        },
        block_offloads=len(plan.block_offloads),
        block_loads=len(plan.block_loads),
        block_copies=len(plan.block_copies),
    )


def ended_record(
    record: StepRecord, plan: StepPlan, result: StepResult | None, duration_ns: int
) -> StepRecord:
    """Return the record with the step's result; None: the step failed."""
    if result is None:
        return msgspec.structs.replace(
            record, duration_ns=duration_ns, num_failed_rows=len(plan.rows)
        )
    return msgspec.structs.replace(
        record,
        duration_ns=duration_ns,
        num_accepted_tokens=sum(_num_accepted(plan, result)),
        num_new_tokens=sum(len(row.token_ids) for row in result.rows),
        num_failed_rows=sum(row.error is not None for row in result.rows),
        adapter_copies_ended=len(result.copies_done) + len(result.copies_failed),
        timing=result.timing,
    )


def _num_accepted(plan: StepPlan, result: StepResult) -> Iterator[int]:
    for row, row_result in zip(plan.rows, result.rows, strict=True):
        if row.draft_token_ids and row_result.token_ids:
            yield len(row_result.token_ids) - 1
