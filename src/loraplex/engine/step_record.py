"""Records of steps for the iteration log, completed by their results."""

from collections.abc import Iterator

import msgspec

from loraplex.core.plan import StepPlan, StepResult
from loraplex.core.stats import StepRecord


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
