"""A StepPlan in the making: rows that join, and what each row computes."""

from loraplex.core.plan import (
    AdapterCopy,
    BlockId,
    LogitsNeeded,
    RowAdded,
    RowStep,
    Slot,
    StepPlan,
)
from loraplex.scheduling.active import ActiveSequence
from loraplex.scheduling.budget import StepBudget


class PlanDraft:
    """Its rows name blocks that their sequences hold already."""

    def __init__(self, budget: StepBudget) -> None:
        self.budget = budget
        self.sequences: list[ActiveSequence] = []
        """Of the rows, in their order."""
        self.num_preempted = 0
        self._added: list[RowAdded] = []
        self._rows: list[RowStep] = []

    def join(self, active: ActiveSequence) -> None:
        """The sequence has just taken its slot."""
        sequence, request = active.sequence, active.request
        assert sequence.slot is not None
        self._added.append(
            RowAdded(
                slot=sequence.slot,
                sequence_id=sequence.sequence_id,
                sampling=request.group.request.sampling,
                seed=sequence.seed,
                sequence_index=sequence.index,
                token_ids=tuple(sequence.token_ids),
                num_prompt_tokens=sequence.num_prompt_tokens,
                suppressed_token_ids=request.stop_rules.suppressed_token_ids,
                adapters=request.group.adapters,
            )
        )

    def compute(
        self, active: ActiveSequence, num_tokens: int, new_block_ids: list[BlockId]
    ) -> None:
        """The next num_tokens tokens of a sequence."""
        self.budget.spend(num_tokens)
        sequence = active.sequence
        assert sequence.slot is not None
        start = sequence.num_computed_tokens
        stop = start + num_tokens
        samples = stop == sequence.num_tokens
        logprobs = active.request.group.request.sampling.logprobs if samples else None
        self._rows.append(
            RowStep(
                slot=sequence.slot,
                start=start,
                num_tokens=num_tokens,
                token_ids=None if active.has_sampled else tuple(sequence.token_ids[start:stop]),
                new_block_ids=(tuple(new_block_ids),),
                logits=_logits_needed(active, samples=samples),
                num_logprobs=logprobs,
            )
        )
        self.sequences.append(active)

    @property
    def num_rows(self) -> int:
        return len(self._rows)

    def build(
        self, step_id: int, removed: tuple[Slot, ...], adapter_copies: tuple[AdapterCopy, ...]
    ) -> StepPlan:
        return StepPlan(
            step_id=step_id,
            removed=removed,
            added=tuple(self._added),
            rows=tuple(self._rows),
            adapter_copies=adapter_copies,
        )


def _logits_needed(active: ActiveSequence, *, samples: bool) -> LogitsNeeded:
    sequence = active.sequence
    if active.scores_prompt and sequence.num_computed_tokens < sequence.num_prompt_tokens:
        return LogitsNeeded.ALL
    return LogitsNeeded.LAST if samples else LogitsNeeded.NONE
