"""The rows that the runner keeps between steps, and the tensors of one step made from them.

Knows slots, block tables and positions; neither requests, nor adapters' weights, nor the model.
"""

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from loraplex.core.adapter import AdapterHandle
from loraplex.core.plan import RowAdded, RowStep, Slot
from loraplex.execution.sampling.rows import num_logits_rows
from loraplex.kernels.lora import LoraBatch
from loraplex.kernels.ops import RowLayout
from loraplex.models.batch import ForwardBatch

IntArray = npt.NDArray[np.int64]


@dataclasses.dataclass(slots=True, eq=False)
class _Row:
    adapters: tuple[tuple[AdapterHandle, float], ...]
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
    logits_indices: torch.Tensor  # [S]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class StepInputs:
    """The tensors of a step but for its tokens: some of them are sampled by the step before."""

    positions: torch.Tensor  # [T]
    slot_mapping: torch.Tensor  # [T]
    rows: RowLayout
    logits_indices: torch.Tensor  # [S]
    adapters: tuple[tuple[tuple[AdapterHandle, float], ...], ...]
    """Of each row: (handle, scale)."""

    def with_tokens(
        self, token_ids: Sequence[Sequence[int]], lora: LoraBatch | None
    ) -> ForwardBatch:
        """token_ids: of each row, as many as it computes."""
        tokens = torch.tensor(list(itertools.chain(*token_ids)), dtype=torch.int64)
        return ForwardBatch(
            token_ids=tokens.to(self.positions.device),
            positions=self.positions,
            slot_mapping=self.slot_mapping,
            rows=self.rows,
            logits_indices=self.logits_indices,
            lora=lora,
        )


class InputBatch:
    """Block tables by slot; a plan only tells how they grow.

    What the last step made is kept as far as the next one needs the same: while rows decode, the
    layout; while none of them takes a block, their block tables.
    """

    def __init__(
        self, max_num_seqs: int, max_model_len: int, block_size: int, device: torch.device
    ) -> None:
        self._block_size = block_size
        self._device = device
        self._rows: dict[Slot, _Row] = {}
        self._block_tables: IntArray = np.zeros(
            (max_num_seqs, -(-max_model_len // block_size)), dtype=np.int64
        )
        self._layout: _Layout | None = None
        self._tables: IntArray = self._block_tables[:0]
        self._device_tables = self._tensor(self._tables)

    def add_row(self, row: RowAdded) -> None:
        assert row.slot not in self._rows, f"slot {row.slot} is taken"
        self._rows[row.slot] = _Row(row.adapters)

    def remove_row(self, slot: Slot) -> None:
        self._rows.pop(slot, None)

    def prepare(self, steps: Sequence[RowStep]) -> StepInputs:
        """The tensors of a step; steps are prepared in their order, whether they run or not."""
        layout = self._layout_of(steps)
        if self._extend_block_tables(steps) or layout is not self._layout:
            num_blocks = max(self._rows[step.slot].num_blocks for step in steps)
            self._tables = self._block_tables[layout.slots, :num_blocks]
            self._device_tables = self._tensor(self._tables)
        self._layout = layout
        starts = np.array([step.start for step in steps], dtype=np.int64)
        positions = starts[layout.row_of_token] + layout.token_in_row
        blocks = self._tables[layout.row_of_token, positions // self._block_size]
        slot_mapping = blocks * self._block_size + positions % self._block_size
        seq_lens = [step.start + step.num_tokens for step in steps]
        return StepInputs(
            positions=self._tensor(positions),
            slot_mapping=self._tensor(slot_mapping),
            rows=RowLayout(layout.query_start_loc, seq_lens, self._device_tables),
            logits_indices=layout.logits_indices,
            adapters=tuple(self._rows[step.slot].adapters for step in steps),
        )

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
            self._tensor(np.flatnonzero(is_wanted)),
        )

    def _extend_block_tables(self, steps: Sequence[RowStep]) -> bool:
        """Whether any row took a block."""
        has_grown = False
        for step in steps:
            row = self._rows[step.slot]
            (new_block_ids,) = step.new_block_ids
            if new_block_ids:
                end = row.num_blocks + len(new_block_ids)
                # A gap is a block that no position sees: any block will do.
                known = [max(block_id, 0) for block_id in new_block_ids]
                self._block_tables[step.slot, row.num_blocks : end] = known
                row.num_blocks = end
                has_grown = True
            end = row.num_blocks * self._block_size
            assert step.start + step.num_tokens <= end, "a block is missing"
        return has_grown

    def _tensor(self, values: IntArray) -> torch.Tensor:
        return torch.from_numpy(values.astype(np.int64, copy=False)).to(self._device)
