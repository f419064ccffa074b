"""What follows from one row's result: append, publish, stop."""

from loraplex.core.errors import ErrorInfo, RowFailedError
from loraplex.core.plan import LogitsNeeded, RowResult, RowStep
from loraplex.scheduling.active import ActiveSequence
from loraplex.scheduling.roster import Roster


def absorb_row(
    roster: Roster, active: ActiveSequence, row: RowStep, result: RowResult, now_ns: int
) -> None:
    """A failed row fails its request, and leaves nothing in the prefix cache."""
    sequence, request = active.sequence, active.request
    samples = row.start + row.num_tokens == sequence.num_tokens
    error = result.error or _shape_error(active, row, result, samples=samples)
    if error is not None:
        roster.fail_request(request, error)
        return
    sequence.num_computed_tokens += row.num_tokens
    sequence.num_hashed_blocks = roster.kv.publish(
        sequence.token_ids,
        request.group.request.kv_salt,
        sequence.block_ids,
        sequence.num_hashed_blocks,
        sequence.num_computed_tokens,
    )
    if row.logits is LogitsNeeded.ALL:
        _absorb_prompt_scores(roster, active, row, result)
    if samples:
        roster.release_held_back(request)
        _append(roster, active, result, now_ns)


def _shape_error(
    active: ActiveSequence, row: RowStep, result: RowResult, *, samples: bool
) -> ErrorInfo | None:
    """A result that does not answer its row is the row's failure, not the engine's."""
    if samples and not result.token_ids:
        return RowFailedError("the model runner gave no token for a row that samples").to_info()
    if row.logits is LogitsNeeded.ALL:
        last = active.sequence.num_prompt_tokens - 1
        num_expected = min(row.start + row.num_tokens, last) - row.start
        if len(result.prompt_logprobs) != num_expected:
            return RowFailedError(
                f"the model runner gave {len(result.prompt_logprobs)} prompt log probabilities "
                f"for a row of {num_expected}"
            ).to_info()
    return None


def _absorb_prompt_scores(
    roster: Roster, active: ActiveSequence, row: RowStep, result: RowResult
) -> None:
    request = active.request
    if row.start == 0:
        request.prompt_scores.clear()  # a preemption may have cut an earlier try short
    request.prompt_scores.extend(result.prompt_logprobs)
    if active.sequence.num_computed_tokens >= active.sequence.num_prompt_tokens:
        request.wants_prompt_scores = False
        roster.outbox.prompt_scores(request)


def _append(roster: Roster, active: ActiveSequence, result: RowResult, now_ns: int) -> None:
    """New tokens, up to the first that ends the sequence."""
    sequence, request = active.sequence, active.request
    group, stop, num_new = request.group, None, 0
    for token_id in result.token_ids:
        sequence.token_ids.append(token_id)
        num_new += 1
        stop = request.stop_rules.after(sequence)
        if stop is not None:
            break
    roster.counts.generation_tokens += num_new
    group.first_token_ns = group.first_token_ns or now_ns
    group.last_token_ns = now_ns
    token_ids, logprobs = result.token_ids[:num_new], result.logprobs[:num_new]
    if stop is None:
        roster.outbox.tokens(active, token_ids, logprobs)
        return
    roster.outbox.tokens(active, token_ids, logprobs, stop.reason, stop.stop_token_id)
    roster.end_sequence(active, stop.reason)
