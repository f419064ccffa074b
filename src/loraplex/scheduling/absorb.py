"""Absorbing the result of one row: append tokens, publish blocks, stop."""

from loraplex.core.errors import ErrorInfo, RowFailedError
from loraplex.core.output import FinishReason, SequenceDelta
from loraplex.core.plan import RowResult, RowStep, Wanted
from loraplex.scheduling.beam_request import BeamRequest
from loraplex.scheduling.beam_scheduling import BeamScheduling
from loraplex.scheduling.pool_request import PoolRequest
from loraplex.scheduling.request import Sequence, Stop
from loraplex.scheduling.state import SchedulerState


class ResultAbsorber:
    """Changes the state of sequences by the results of their rows."""

    def __init__(self, state: SchedulerState, beams: BeamScheduling) -> None:
        self._state = state
        self._beams = beams

    def absorb(self, sequence: Sequence, row: RowStep, result: RowResult, now_ns: int) -> None:
        """Take one result. A failed row fails its request and adds nothing to the prefix cache."""
        request = sequence.request
        num_known = row.num_tokens - len(row.draft_token_ids)
        samples = row.start + num_known == sequence.num_tokens
        error = result.error or _result_error(sequence, row, result, samples=samples)
        if error is not None:
            self._state.fail_request(request, error)
            return
        if result.is_deferred:
            sequence.num_computed_tokens += num_known - 1
            self._publish(sequence)
            return
        num_new, stop = _append(sequence, result)
        # The KV of a draft token is of use if the draft token is a token now.
        num_accepted = min(num_new, len(result.token_ids) - 1) if row.draft_token_ids else 0
        sequence.num_computed_tokens += num_known + num_accepted
        if row.draft_token_ids:
            self._count_draft_tokens(sequence, len(row.draft_token_ids), num_accepted)
        self._publish(sequence)
        if row.wanted is Wanted.ALL:
            self._absorb_prompt_scores(sequence, row, result)
        if not samples:
            return
        if isinstance(request, BeamRequest):
            self._beams.absorb(request, sequence, result.candidates, now_ns)
        elif isinstance(request, PoolRequest):
            self._end_pooled(sequence, result, now_ns)
        else:
            self._state.release_held_back(request)
            self._output(sequence, result, num_new, stop, now_ns)

    def _publish(self, sequence: Sequence) -> None:
        """Offer full blocks to the prefix cache, and free those that a window has passed."""
        request, kv = sequence.request.engine_request, self._state.kv
        has_full_block = sequence.num_computed_tokens // kv.block_size > sequence.num_hashed_blocks
        if not (has_full_block or kv.frees_early or sequence.image_cells):
            return
        num_released = sequence.num_hashed_blocks * kv.block_size
        sequence.num_hashed_blocks = kv.publish(
            sequence.token_ids,
            sequence.kv_salt,
            sequence.block_tables,
            sequence.num_hashed_blocks,
            sequence.num_computed_tokens,
            later_salts=sequence.later_salts,
            retention=request.retention,
            num_prompt_tokens=sequence.num_prompt_tokens,
        )
        kv.release_passed(sequence.block_tables, sequence.num_computed_tokens, num_released)
        if sequence.image_cells:
            self._state.release_images(sequence, sequence.num_computed_tokens)

    def _absorb_prompt_scores(self, sequence: Sequence, row: RowStep, result: RowResult) -> None:
        request = sequence.request
        if row.start == 0:  # a preemption may have cut an earlier attempt short
            request.prompt_logprobs.clear()
            request.prompt_logits.clear()
        request.prompt_logprobs.extend(result.prompt_logprobs)
        if result.prompt_logits is not None:
            request.prompt_logits.append(result.prompt_logits)
        if sequence.num_computed_tokens >= sequence.num_prompt_tokens:
            request.wants_prompt_scores = False
            self._state.outputs.add_prompt_scores(request)

    def _count_draft_tokens(self, sequence: Sequence, num_drafted: int, num_accepted: int) -> None:
        request, counts = sequence.request, self._state.counts
        request.num_draft_tokens += num_drafted
        request.num_accepted_tokens += num_accepted
        counts.draft_tokens += num_drafted
        counts.accepted_tokens += num_accepted
        if sequence.drafter is not None:
            sequence.drafter.verified(num_drafted, num_accepted, sequence.num_tokens)

    def _output(
        self, sequence: Sequence, result: RowResult, num_new: int, stop: Stop | None, now_ns: int
    ) -> None:
        """Output the new tokens; with a stop, end the sequence."""
        state, request = self._state, sequence.request
        state.counts.generation_tokens += num_new
        state.count_output(sequence, num_new)
        request.last_token_ns = now_ns
        if not request.first_token_ns:
            request.first_token_ns = now_ns
            state.outputs.add_timing(request)
        if sequence.drafter is not None:
            sequence.drafter.force(result.forced_token_ids)
        delta = SequenceDelta(
            sequence.index,
            result.token_ids[:num_new],
            result.logprobs[:num_new],
            None if stop is None else stop.reason,
            None if stop is None else stop.stop_token_id,
            () if result.logits is None else (result.logits,),
        )
        state.outputs.add(request, delta)
        if stop is not None:
            state.end_sequence(sequence, stop.reason)

    def _end_pooled(self, sequence: Sequence, result: RowResult, now_ns: int) -> None:
        """Output the vector, which ends the sequence."""
        request = sequence.request
        request.first_token_ns = request.last_token_ns = now_ns
        reason = FinishReason.STOP
        delta = SequenceDelta(sequence.index, finish_reason=reason, pooled=result.pooled)
        self._state.outputs.add(request, delta)
        self._state.end_sequence(sequence, reason)


def _append(sequence: Sequence, result: RowResult) -> tuple[int, Stop | None]:
    """Append new tokens up to the first that ends the sequence; return how many, and the end."""
    stop, num_new = None, 0
    for token_id in result.token_ids:
        sequence.token_ids.append(token_id)
        num_new += 1
        rules = sequence.request.stop_rules
        stop = rules.after(sequence.token_ids, sequence.num_prompt_tokens)
        if stop is not None:
            break
    return num_new, stop


def _result_error(
    sequence: Sequence, row: RowStep, result: RowResult, *, samples: bool
) -> ErrorInfo | None:
    """Return why a result does not fit its row. That fails the row, not the engine."""
    request = sequence.request
    if samples and not (result.is_deferred or request.has_sample(result)):
        return RowFailedError(
            "the model runner gave no result for the last position of a row"
        ).to_info()
    num_drafted = max(0, len(result.token_ids) - 1)
    if result.token_ids[:num_drafted] != row.draft_token_ids[:num_drafted]:
        return RowFailedError(
            f"the model runner gave {len(result.token_ids)} tokens that do not follow the "
            f"{len(row.draft_token_ids)} draft tokens of the row"
        ).to_info()
    if row.wanted is Wanted.ALL and request.sampling.prompt_logprobs is not None:
        last = sequence.num_prompt_tokens - 1
        num_expected = min(row.start + row.num_tokens, last) - row.start
        if len(result.prompt_logprobs) != num_expected:
            return RowFailedError(
                f"the model runner gave {len(result.prompt_logprobs)} prompt log probabilities "
                f"for a row of {num_expected}"
            ).to_info()
    return None
