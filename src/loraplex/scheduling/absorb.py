"""What follows from one row's result: append, publish, stop."""

from loraplex.core.errors import ErrorInfo, RowFailedError
from loraplex.core.plan import LogitsNeeded, RowResult, RowStep
from loraplex.scheduling.active import ActiveSequence
from loraplex.scheduling.beam_rows import absorb_candidates
from loraplex.scheduling.roster import Roster
from loraplex.scheduling.stop import Stop


def absorb_row(
    roster: Roster, active: ActiveSequence, row: RowStep, result: RowResult, now_ns: int
) -> None:
    """A failed row fails its request, and leaves nothing in the prefix cache."""
    sequence, request = active.sequence, active.request
    num_known = row.num_tokens - len(row.draft_token_ids)
    samples = row.start + num_known == sequence.num_tokens
    error = result.error or _shape_error(active, row, result, samples=samples)
    if error is not None:
        roster.fail_request(request, error)
        return
    num_new, stop = _append(active, result)
    # The KV of a draft is of use if the draft is now a token.
    num_accepted = min(num_new, len(result.token_ids) - 1) if row.draft_token_ids else 0
    sequence.num_computed_tokens += num_known + num_accepted
    if row.draft_token_ids:
        _count_drafts(roster, active, len(row.draft_token_ids), num_accepted)
    sequence.num_hashed_blocks = roster.kv.publish(
        sequence.token_ids,
        request.group.request.kv_salt,
        sequence.block_ids,
        sequence.num_hashed_blocks,
        sequence.num_computed_tokens,
        retention=request.group.request.retention,
        num_prompt_tokens=sequence.num_prompt_tokens,
    )
    roster.kv.release_behind(
        sequence.block_ids, sequence.num_computed_tokens, sequence.num_hashed_blocks
    )
    if row.logits is LogitsNeeded.ALL:
        _absorb_prompt_scores(roster, active, row, result)
    if samples and request.beams is not None:
        absorb_candidates(roster, active, result.candidates, now_ns)
    elif samples:
        roster.release_held_back(request)
        _tell(roster, active, result, num_new, stop, now_ns)


def _shape_error(
    active: ActiveSequence, row: RowStep, result: RowResult, *, samples: bool
) -> ErrorInfo | None:
    """A result that does not answer its row is the row's failure, not the engine's."""
    beams = active.request.beams
    if samples and not (result.token_ids if beams is None else result.candidates):
        return RowFailedError("the model runner gave no token for a row that samples").to_info()
    num_guessed = max(0, len(result.token_ids) - 1)
    if result.token_ids[:num_guessed] != row.draft_token_ids[:num_guessed]:
        return RowFailedError(
            f"the model runner gave {len(result.token_ids)} tokens that do not follow the "
            f"{len(row.draft_token_ids)} drafts of the row"
        ).to_info()
    if row.logits is LogitsNeeded.ALL and _wants_prompt_logprobs(active):
        last = active.sequence.num_prompt_tokens - 1
        num_expected = min(row.start + row.num_tokens, last) - row.start
        if len(result.prompt_logprobs) != num_expected:
            return RowFailedError(
                f"the model runner gave {len(result.prompt_logprobs)} prompt log probabilities "
                f"for a row of {num_expected}"
            ).to_info()
    return None


def _wants_prompt_logprobs(active: ActiveSequence) -> bool:
    return active.request.group.request.sampling.prompt_logprobs is not None


def _absorb_prompt_scores(
    roster: Roster, active: ActiveSequence, row: RowStep, result: RowResult
) -> None:
    request = active.request
    if row.start == 0:  # a preemption may have cut an earlier try short
        request.prompt_scores.clear()
        request.prompt_logits.clear()
    request.prompt_scores.extend(result.prompt_logprobs)
    if result.prompt_logits is not None:
        request.prompt_logits.append(result.prompt_logits)
    if active.sequence.num_computed_tokens >= active.sequence.num_prompt_tokens:
        request.wants_prompt_scores = False
        roster.outbox.prompt_scores(request)


def _append(active: ActiveSequence, result: RowResult) -> tuple[int, Stop | None]:
    """New tokens, up to the first that ends the sequence: how many, and the end."""
    stop, num_new = None, 0
    for token_id in result.token_ids:
        active.sequence.token_ids.append(token_id)
        num_new += 1
        stop = active.request.stop_rules.after(active.sequence)
        if stop is not None:
            break
    return num_new, stop


def _count_drafts(
    roster: Roster, active: ActiveSequence, num_drafted: int, num_accepted: int
) -> None:
    request, counts = active.request, roster.counts
    request.num_draft_tokens += num_drafted
    request.num_accepted_tokens += num_accepted
    counts.draft_tokens += num_drafted
    counts.accepted_tokens += num_accepted
    if active.drafter is not None:
        active.drafter.verified(num_drafted, num_accepted, active.sequence.num_tokens)


def _tell(
    roster: Roster,
    active: ActiveSequence,
    result: RowResult,
    num_new: int,
    stop: Stop | None,
    now_ns: int,
) -> None:
    """The new tokens go out; with a stop, the sequence ends."""
    request, group = active.request, active.request.group
    roster.counts.generation_tokens += num_new
    roster.served(active, num_new)
    is_first = not group.first_token_ns
    group.first_token_ns = group.first_token_ns or now_ns
    group.last_token_ns = now_ns
    if is_first:
        roster.outbox.timing(request)
    if active.drafter is not None:
        active.drafter.force(result.forced_token_ids)
    roster.outbox.tokens(
        active,
        result.token_ids[:num_new],
        result.logprobs[:num_new],
        None if stop is None else stop.reason,
        None if stop is None else stop.stop_token_id,
        () if result.logits is None else (result.logits,),
    )
    if stop is not None:
        roster.end_sequence(active, stop.reason)
