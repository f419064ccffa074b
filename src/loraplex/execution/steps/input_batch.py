"""The rows that the runner keeps between steps, and the numbers of one step made from them.

Knows slots, block tables and positions; neither requests, nor adapters' weights, nor the model,
nor where the numbers go (`step_tensors`).
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from loraplex.core.adapter import AdapterHandle
from loraplex.core.plan import BlockId, RotationBorder, RowAdded, RowStep, Slot
from loraplex.execution.sampling.rows import num_logits_rows
from loraplex.models.batch import RotatedSpan

IntArray = npt.NDArray[np.int64]
RowAdapters = tuple[tuple[AdapterHandle, float], ...]
"""(handle, scale) of each adapter of one row."""


NewBlocks = tuple[Slot, int, tuple[list[BlockId], ...]]
"""What was appended to the block tables of a row: from which index on, and for each KV group."""


@dataclasses.dataclass(slots=True, eq=False)
class _Row:
    adapters: RowAdapters
    rotation_length: int = 0
    """Zero: each position is rotated for its own length."""
    num_blocks: int = 0


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Layout:
    """What depends on who computes how many tokens, and not on where they are by now."""

    shape: tuple[tuple[Slot, int, int], ...]
    """Slot, number of tokens and of wanted logits of each row."""
    slots: IntArray  # [R]
    query_start_loc: list[int]
    row_of_token: IntArray  # [T]
    token_in_row: IntArray  # [T]
    logits_indices: IntArray  # [S]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class StepInputs:
    """The numbers of a step but for its tokens: some of them are sampled by the step before."""

    slots: IntArray  # [R]
    query_start_loc: list[int]  # R + 1
    seq_lens: list[int]  # R
    row_of_token: IntArray  # [T]
    positions: IntArray  # [T]
    slot_mappings: tuple[IntArray, ...]  # [T] of each KV group
    logits_indices: IntArray  # [S]
    block_tables: tuple[IntArray, ...]  # [R, most blocks of these rows] of each KV group
    new_blocks: tuple[NewBlocks, ...]
    adapters: tuple[RowAdapters, ...]  # of each step of a row
    rotated_spans: tuple[RotatedSpan, ...] = ()
    num_padding: int = 0
    """Number of additional tokens whose results no row reads."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens without padding."""
        return self.query_start_loc[-1]

    @property
    def wants_all_logits(self) -> bool:
        """Whether the step computes newest tokens and draft tokens only."""
        return self.num_tokens == len(self.logits_indices) > 0

    def with_row_per_token(self) -> "StepInputs":
        """Return the step with a row for each token; `adapters` stay those of the original rows.

        A layer writes the KV of all tokens before it attends, so a token sees those before it.
        """
        return dataclasses.replace(
            self,
            slots=self.slots[self.row_of_token],
            query_start_loc=list(range(self.num_tokens + 1)),
            seq_lens=(self.positions + 1).tolist(),
            row_of_token=np.arange(self.num_tokens),
            block_tables=tuple(tables[self.row_of_token] for tables in self.block_tables),
        )

    def of_rows(self, rows: Sequence[int]) -> "StepInputs":
        """The step with these rows alone, which are named in their order."""
        num_rows = len(self.seq_lens)
        if len(rows) == num_rows:
            return self
        is_kept = np.zeros(num_rows, np.bool_)
        is_kept[list(rows)] = True
        tokens = is_kept[self.row_of_token]
        places = tokens.cumsum() - 1
        wanted = self.logits_indices[tokens[self.logits_indices]]
        counts = np.diff(self.query_start_loc)[is_kept]
        spans = [span for span in self.rotated_spans if tokens[span.first_token]]
        return StepInputs(
            slots=self.slots[is_kept],
            query_start_loc=[0, *counts.cumsum().tolist()],
            seq_lens=[self.seq_lens[row] for row in rows],
            row_of_token=(is_kept.cumsum() - 1)[self.row_of_token[tokens]],
            positions=self.positions[tokens],
            slot_mappings=tuple(mapping[tokens] for mapping in self.slot_mappings),
            logits_indices=places[wanted],
            block_tables=tuple(tables[is_kept] for tables in self.block_tables),
            new_blocks=self.new_blocks,
            adapters=tuple(self.adapters[row] for row in rows),
            rotated_spans=tuple(
                span._replace(first_token=int(places[span.first_token])) for span in spans
            ),
        )


def no_rows(num_kv_groups: int) -> StepInputs:
    """Return the inputs of a step that computes nothing but padding."""
    none = np.zeros(0, np.int64)
    return StepInputs(
        slots=none,
        query_start_loc=[0],
        seq_lens=[],
        row_of_token=none,
        positions=none,
        slot_mappings=(none,) * num_kv_groups,
        logits_indices=none,
        block_tables=(none.reshape(0, 0),) * num_kv_groups,
        new_blocks=(),
        adapters=(),
    )


class InputBatch:
    """Block tables by slot; a plan contains only the blocks that are new.

    What the last step made is kept as far as the next one needs the same: while rows decode, the
    layout; while none of them takes a block, their block tables. The tables of all KV groups have
    the same length: a position lies in the same block of each.
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        num_kv_groups: int = 1,
        rotation_border: RotationBorder | None = None,
    ) -> None:
        self._border = rotation_border
        self._block_size = block_size
        self._rows: dict[Slot, _Row] = {}
        shape = (max_num_seqs, -(-max_model_len // block_size))
        self._block_tables: tuple[IntArray, ...] = tuple(
            np.zeros(shape, dtype=np.int64) for _ in range(num_kv_groups)
        )
        self._layout: _Layout | None = None
        self._tables: tuple[IntArray, ...] = ()

    def add_row(self, row: RowAdded) -> None:
        assert row.slot not in self._rows, f"slot {row.slot} is taken"
        length = 0
        if self._border is not None:
            length = self._border.rotation_length(row.num_prompt_tokens, len(row.token_ids))
        self._rows[row.slot] = _Row(row.adapters, length)

    def remove_row(self, slot: Slot) -> None:
        self._rows.pop(slot, None)

    def prepare(self, steps: Sequence[RowStep]) -> StepInputs:
        """The numbers of a step; steps are prepared in their order, whether they run or not."""
        layout = self._layout_of(steps)
        new_blocks = self._extend_block_tables(steps)
        if new_blocks or layout is not self._layout:
            num_blocks = max(self._rows[step.slot].num_blocks for step in steps)
            self._tables = tuple(tables[layout.slots, :num_blocks] for tables in self._block_tables)
        self._layout = layout
        starts = np.array([step.start for step in steps], dtype=np.int64)
        positions = starts[layout.row_of_token] + layout.token_in_row
        indices, offsets = positions // self._block_size, positions % self._block_size
        return StepInputs(
            slots=layout.slots,
            query_start_loc=layout.query_start_loc,
            seq_lens=[step.start + step.num_tokens for step in steps],
            row_of_token=layout.row_of_token,
            positions=positions,
            slot_mappings=tuple(
                tables[layout.row_of_token, indices] * self._block_size + offsets
                for tables in self._tables
            ),
            logits_indices=layout.logits_indices,
            block_tables=self._tables,
            new_blocks=tuple(new_blocks),
            adapters=tuple(self._rows[step.slot].adapters for step in steps),
            rotated_spans=() if self._border is None else self._spans(steps, layout),
        )

    def _spans(self, steps: Sequence[RowStep], layout: _Layout) -> tuple[RotatedSpan, ...]:
        """Return the tokens whose own length is less than the rotation length of their row."""
        spans = []
        for step, first_token in zip(steps, layout.query_start_loc, strict=False):
            length = self._rows[step.slot].rotation_length
            num_tokens = min(step.num_tokens, length - 1 - step.start)
            if num_tokens > 0:
                spans.append(RotatedSpan(first_token, step.start, num_tokens, length))
        return tuple(spans)

    def _layout_of(self, steps: Sequence[RowStep]) -> _Layout:
        """That of the last step, if it is the same."""
        shape = tuple((step.slot, step.num_tokens, num_logits_rows(step)) for step in steps)
        if self._layout is not None and self._layout.shape == shape:
            return self._layout
        slots, counts, num_logits = np.array(shape, dtype=np.int64).T
        ends = counts.cumsum()
        row_of_token = np.repeat(np.arange(len(shape)), counts)
        token_in_row = np.arange(ends[-1]) - (ends - counts)[row_of_token]
        is_wanted = token_in_row >= (counts - num_logits)[row_of_token]
        return _Layout(
            shape,
            slots,
            [0, *ends.tolist()],
            row_of_token,
            token_in_row,
            np.flatnonzero(is_wanted),
        )

    def _extend_block_tables(self, steps: Sequence[RowStep]) -> list[NewBlocks]:
        """Append the new blocks; the result is StepInputs.new_blocks."""
        extended = []
        for step in steps:
            row = self._rows[step.slot]
            num_new = len(step.new_block_ids[0])
            if num_new:
                end = row.num_blocks + num_new
                # A gap is a block that no position sees: any block will do.
                known = tuple(
                    [max(block_id, 0) for block_id in block_ids] for block_ids in step.new_block_ids
                )
                for tables, block_ids in zip(self._block_tables, known, strict=True):
                    assert len(block_ids) == num_new, "the tables of all groups grow together"
                    tables[step.slot, row.num_blocks : end] = block_ids
                extended.append((step.slot, row.num_blocks, known))
                row.num_blocks = end
            end = row.num_blocks * self._block_size
            assert step.start + step.num_tokens <= end, "a block is missing"
        return extended
