"""A StepPlan in the making: rows that join, and what each row computes."""

import msgspec

from loraplex.core.plan import (
    AdapterCopy,
    BlockCopy,
    BlockId,
    BlockTransfer,
    LogitsNeeded,
    RowAdded,
    RowStep,
    Slot,
    StepPlan,
)
from loraplex.scheduling.active import ActiveSequence
from loraplex.scheduling.budget import StepBudget
from loraplex.scheduling.roster import Roster


class PlanDraft:
    """Its rows name blocks that their sequences hold already."""

    def __init__(self, budget: StepBudget, *, is_ahead: bool = False) -> None:
        """is_ahead: a plan is in flight, and nobody may be preempted."""
        self.budget = budget
        self.is_ahead = is_ahead
        self.is_short = False
        """Somebody was left out who needs a block of another one."""
        self.sequences: list[ActiveSequence] = []
        """Of the rows, in their order."""
        self.num_preempted = 0
        self.named: dict[ActiveSequence, list[BlockId]] = {}
        """Those that the plan names, with the blocks that are new to the runner."""
        self.joined: list[ActiveSequence] = []
        self.block_loads: list[BlockTransfer] = []
        self.block_offloads: list[BlockTransfer] = []
        self.offloaded: list[ActiveSequence] = []
        """Whose KV this plan brings to the host."""
        self._added: list[RowAdded] = []
        self._rows: list[RowStep] = []
        self._block_copies: list[BlockCopy] = []

    def preempt(self, roster: Roster, active: ActiveSequence) -> None:
        """A sequence loses its slot; its KV goes to the host if there is room.

        Not after a load: the step offloads first, and the room may be that of what is loaded.
        """
        transfers = roster.preempt(active, may_offload=not self.block_loads)
        self.num_preempted += 1
        self.block_offloads.extend(transfers)
        if transfers:
            self.offloaded.append(active)

    def names(self, active: ActiveSequence) -> bool:
        """Is the sequence in the plan, or another beam of its search?"""
        if active.request.beams is None:
            return active in self.named
        return any(other in self.named for other in active.request.sequences)

    def join(self, active: ActiveSequence) -> None:
        """The sequence has just taken its slot."""
        sequence, request = active.sequence, active.request
        assert sequence.slot is not None
        self.joined.append(active)
        self.named.setdefault(active, [])
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
                end_token_ids=request.stop_rules.grammar_end_ids,
                adapters=request.group.adapters,
            )
        )

    def compute(
        self, active: ActiveSequence, num_tokens: int, new_block_ids: list[BlockId]
    ) -> None:
        """The next num_tokens tokens of a sequence."""
        self.budget.spend(num_tokens)
        self.named.setdefault(active, new_block_ids)
        sequence = active.sequence
        assert sequence.slot is not None
        start = sequence.num_computed_tokens
        stop = start + num_tokens
        samples = stop == sequence.num_tokens
        beams = active.request.beams
        if beams is not None and sequence.index in beams.unnamed:
            beams.unnamed.remove(sequence.index)
            new_block_ids = sequence.block_ids
        # What a beam gains is chosen by the search.
        names_tokens = beams is not None or not active.has_sampled
        logprobs = active.request.group.request.sampling.logprobs
        self._rows.append(
            RowStep(
                slot=sequence.slot,
                start=start,
                num_tokens=num_tokens,
                token_ids=tuple(sequence.token_ids[start:stop]) if names_tokens else None,
                new_block_ids=(tuple(new_block_ids),),
                logits=_logits_needed(active, samples=samples),
                num_logprobs=logprobs if samples and beams is None else None,
                num_candidates=beams.search.num_candidates if samples and beams else 0,
            )
        )
        self.sequences.append(active)

    def add_drafts(
        self, index: int, draft_token_ids: tuple[int, ...], new_block_ids: list[BlockId]
    ) -> None:
        """Guesses at what follows the token of a row that decodes."""
        self.budget.spend(len(draft_token_ids))
        row = self._rows[index]
        assert row.token_ids is None, row
        assert not row.draft_token_ids, row
        self._rows[index] = msgspec.structs.replace(
            row,
            num_tokens=row.num_tokens + len(draft_token_ids),
            draft_token_ids=draft_token_ids,
            new_block_ids=((*row.new_block_ids[0], *new_block_ids),),
        )

    def copy(self, copies: tuple[BlockCopy, ...]) -> None:
        """Before the rows run."""
        self._block_copies.extend(copies)

    def row(self, index: int) -> RowStep:
        return self._rows[index]

    @property
    def lacks_blocks(self) -> bool:
        """Who runs needs more than there is: nobody who waits may have any."""
        return self.num_preempted > 0 or self.is_short

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
            block_offloads=tuple(self.block_offloads),
            block_loads=tuple(self.block_loads),
            block_copies=tuple(self._block_copies),
            adapter_copies=adapter_copies,
        )


def _logits_needed(active: ActiveSequence, *, samples: bool) -> LogitsNeeded:
    sequence = active.sequence
    if active.scores_prompt and sequence.num_computed_tokens < sequence.num_prompt_tokens:
        return LogitsNeeded.ALL
    return LogitsNeeded.LAST if samples else LogitsNeeded.NONE
