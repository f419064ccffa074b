"""Records of steps for the iteration log: batch, memory and times."""

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

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
    row_adapters: Sequence[tuple[AdapterHandle, ...]],
    adapters: AdapterHandles,
) -> StepRecord:
    """Return the scheduler's record of a step, completed from its plan.

    row_adapters: the adapters of each row.
    """
    prefill = [row.num_tokens for row in plan.rows if row.token_ids is not None]
    num_draft_tokens = sum(len(row.draft_token_ids) for row in plan.rows)
    most_used = Counter(itertools.chain.from_iterable(row_adapters)).most_common(MAX_ADAPTERS)

    def by_digest(kind: Iterable[bool]) -> dict[str, int]:
        """Return the number of uses in the rows of one kind."""
        counts = Counter(
            handle
            for handles, is_one in zip(row_adapters, kind, strict=True)
            if is_one
            for handle in handles or (None,)
        )
        base = {"": counts[None]} if None in counts else {}
        named = (handle for handle, _ in most_used if handle in counts)
        return base | {adapters.digest(handle): counts[handle] for handle in named}

    return msgspec.structs.replace(
        record,
        num_prefill_tokens=sum(prefill),
        num_draft_tokens=num_draft_tokens,
        num_added=len(plan.added),
        adapter_rows={adapters.digest(handle): count for handle, count in most_used},
        prefill_rows=by_digest(row.token_ids is not None for row in plan.rows) if prefill else {},
        draft_rows=(
            by_digest(bool(row.draft_token_ids) for row in plan.rows) if num_draft_tokens else {}
        ),
        num_base_rows=row_adapters.count(()),
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
