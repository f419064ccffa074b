"""A StepPlan under construction: rows that join, and what each row computes."""

import msgspec

from loraplex.core.image import images_in
from loraplex.core.plan import (
    AdapterCopy,
    BlockCopy,
    BlockTransfer,
    CellId,
    Encode,
    EncodeText,
    RowAdded,
    RowStep,
    Slot,
    StepPlan,
    Wanted,
)
from loraplex.memory.block_tables import NewBlocks
from loraplex.scheduling.request import Sequence
from loraplex.scheduling.state import SchedulerState


class StepBudget:
    """Token budget of one plan."""

    def __init__(self, max_num_batched_tokens: int, max_prefill_chunk: int | None = None) -> None:
        self.num_left = max_num_batched_tokens
        self.num_spent = 0
        self.max_per_row = max_prefill_chunk or max_num_batched_tokens
        """Maximum number of tokens that one row computes."""

    def keep(self, num_tokens: int) -> None:
        """Leave at most so many tokens."""
        self.num_left = min(self.num_left, num_tokens)

    def spend(self, num_tokens: int) -> None:
        assert 0 < num_tokens <= self.num_left
        self.num_left -= num_tokens
        self.num_spent += num_tokens


class PlanBuilder:
    """Collects the parts of a plan. Its rows name blocks that their sequences already have."""

    def __init__(self, budget: StepBudget, *, is_ahead: bool) -> None:
        """is_ahead: other steps are in flight, and no sequence may be preempted."""
        self.budget = budget
        self.is_ahead = is_ahead
        self.is_short = False
        """A sequence was left out because it needs a slot or a block that another one has."""
        self.lacks_blocks = False
        """Running sequences need more blocks than there are: no waiting one gets any."""
        self.sequences: list[Sequence] = []
        """Sequences of the rows, in their order."""
        self.num_preempted = 0
        self.new_blocks: dict[Sequence, NewBlocks] = {}
        """Sequences that the plan names, with the blocks that are new to the runner."""
        self.joined: list[Sequence] = []
        self.block_loads: list[BlockTransfer] = []
        self.block_offloads: list[BlockTransfer] = []
        self.offloaded: list[Sequence] = []
        """Sequences whose KV this plan copies to the host."""
        self._added: list[RowAdded] = []
        self._rows: list[RowStep] = []
        self._block_copies: list[BlockCopy] = []
        self._encodes: list[Encode] = []
        self.num_encoded: dict[Sequence, int] = {}
        """Tokens of the images that are encoded for a sequence."""

    def preempt(self, state: SchedulerState, sequence: Sequence) -> None:
        """Take a sequence's slot away; its KV goes to the host if there is space.

        Nothing is offloaded after a load: a step offloads first, and the space may be that of the
        blocks that are loaded.
        """
        transfers = state.preempt(sequence, may_offload=not self.block_loads)
        self.num_preempted += 1
        self.block_offloads.extend(transfers)
        if transfers:
            self.offloaded.append(sequence)

    def includes(self, sequence: Sequence) -> bool:
        """Return whether the plan names the sequence, or one that is scheduled with it."""
        together = sequence.request.scheduled_with(sequence)
        return any(other in self.new_blocks for other in together)

    def join(self, sequence: Sequence) -> None:
        """Add the row of a sequence that has just taken its slot."""
        request = sequence.request
        assert sequence.slot is not None
        self.joined.append(sequence)
        self.new_blocks.setdefault(sequence, ())
        self._added.append(
            RowAdded(
                slot=sequence.slot,
                sequence_id=sequence.sequence_id,
                task=request.row_task(sequence),
                sequence_index=sequence.index,
                token_ids=tuple(sequence.token_ids),
                num_prompt_tokens=sequence.num_prompt_tokens,
                adapters=request.adapters,
                tenant=request.engine_request.tenant,
                images=request.images,
                encoder_token_ids=request.engine_request.encoder_token_ids,
            )
        )

    def compute(self, sequence: Sequence, num_tokens: int, new_block_ids: NewBlocks) -> None:
        """Let a sequence compute its next num_tokens tokens, and encode what these need first."""
        image_cells = self._encode(sequence, num_tokens) if sequence.image_cells else ()
        self.budget.spend(sequence.input_to_encode + num_tokens)
        self.new_blocks.setdefault(sequence, new_block_ids)
        assert sequence.slot is not None
        if sequence.input_to_encode:
            self._encodes.append(EncodeText(sequence.slot))
            sequence.input_to_encode = 0
        start = sequence.num_computed_tokens
        stop = start + num_tokens
        samples = stop == sequence.num_tokens
        request = sequence.request
        row = RowStep(
            slot=sequence.slot,
            start=start,
            num_tokens=num_tokens,
            # None: the runner still has the token that the row sampled.
            token_ids=None if sequence.has_sampled else tuple(sequence.token_ids[start:stop]),
            new_block_ids=new_block_ids,
            wanted=_wanted(sequence, samples=samples),
            num_logprobs=request.num_logprobs if samples else None,
            image_cells=image_cells,
        )
        self._rows.append(request.complete_row(sequence, row))
        self.sequences.append(sequence)

    def _encode(self, sequence: Sequence, num_tokens: int) -> tuple[CellId, ...]:
        """Encode images of the next num_tokens tokens; return the cells of all of these images."""
        num_to_encode = sequence.num_to_encode(num_tokens)
        if num_to_encode:
            self.budget.spend(num_to_encode)
            self._encodes += sequence.encode(num_tokens)
            self.num_encoded[sequence] = num_to_encode
        start = sequence.num_computed_tokens
        images = images_in(sequence.request.images, start, start + num_tokens)
        return tuple(sequence.image_cells[image.first].cell_id for image in images)

    def add_draft_tokens(
        self, index: int, draft_token_ids: tuple[int, ...], new_block_ids: NewBlocks
    ) -> None:
        """Lengthen a decoding row by draft tokens."""
        self.budget.spend(len(draft_token_ids))
        row = self._rows[index]
        assert row.token_ids is None, row
        assert not row.draft_token_ids, row
        self._rows[index] = msgspec.structs.replace(
            row,
            num_tokens=row.num_tokens + len(draft_token_ids),
            draft_token_ids=draft_token_ids,
            new_block_ids=tuple(
                (*old, *new) for old, new in zip(row.new_block_ids, new_block_ids, strict=True)
            ),
        )

    def copy(self, copies: tuple[BlockCopy, ...]) -> None:
        """Copy blocks before the rows run."""
        self._block_copies.extend(copies)

    def row(self, index: int) -> RowStep:
        return self._rows[index]

    @property
    def num_rows(self) -> int:
        return len(self._rows)

    def build(
        self, step_id: int, removed: tuple[Slot, ...], adapter_copies: tuple[AdapterCopy, ...]
    ) -> StepPlan:
        """Return the plan."""
        return StepPlan(
            step_id=step_id,
            removed=removed,
            added=tuple(self._added),
            rows=tuple(self._rows),
            block_offloads=tuple(self.block_offloads),
            block_loads=tuple(self.block_loads),
            block_copies=tuple(self._block_copies),
            adapter_copies=adapter_copies,
            encodes=tuple(self._encodes),
        )


def _wanted(sequence: Sequence, *, samples: bool) -> Wanted:
    if sequence.scores_prompt and sequence.num_computed_tokens < sequence.num_prompt_tokens:
        return Wanted.ALL
    return Wanted.LAST if samples else Wanted.NONE
