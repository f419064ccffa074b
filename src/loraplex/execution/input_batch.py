"""The rows that the runner keeps between steps, and the tensors of one step made from them.

Knows slots, block tables and positions; neither requests, nor adapters' weights, nor the model.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from loraplex.core.adapter import AdapterHandle
from loraplex.core.plan import RowAdded, RowStep, Slot
from loraplex.execution.sampler import num_logits_rows
from loraplex.kernels.lora import LoraBatch
from loraplex.kernels.ops import RowLayout
from loraplex.models.batch import ForwardBatch

IntArray = npt.NDArray[np.int64]


@dataclasses.dataclass(slots=True, eq=False)
class _Row:
    adapters: tuple[tuple[AdapterHandle, float], ...]
    num_blocks: int = 0


class InputBatch:
    """Block tables by slot; a plan only tells how they grow."""

    def __init__(
        self, max_num_seqs: int, max_model_len: int, block_size: int, device: torch.device
    ) -> None:
        self._block_size = block_size
        self._device = device
        self._rows: dict[Slot, _Row] = {}
        self._block_tables: IntArray = np.zeros(
            (max_num_seqs, -(-max_model_len // block_size)), dtype=np.int64
        )

    def add_row(self, row: RowAdded) -> None:
        assert row.slot not in self._rows, f"slot {row.slot} is taken"
        self._rows[row.slot] = _Row(row.adapters)

    def remove_row(self, slot: Slot) -> None:
        self._rows.pop(slot, None)

    def adapters(self, slot: Slot) -> tuple[tuple[AdapterHandle, float], ...]:
        return self._rows[slot].adapters

    def forward_batch(
        self,
        steps: Sequence[RowStep],
        token_ids: Sequence[Sequence[int]],
        lora: LoraBatch | None,
    ) -> ForwardBatch:
        """The tensors of a step; token_ids are those of each row, num_tokens of them."""
        for step in steps:
            self._extend_block_table(step)
        starts = np.array([step.start for step in steps], dtype=np.int64)
        counts = np.array([step.num_tokens for step in steps], dtype=np.int64)
        query_start_loc = np.concatenate(([0], counts.cumsum()))
        row_of_token = np.repeat(np.arange(len(steps)), counts)
        token_in_row = np.arange(query_start_loc[-1]) - query_start_loc[row_of_token]
        positions = starts[row_of_token] + token_in_row
        seq_lens = starts + counts
        tables = self._tables([step.slot for step in steps], int(seq_lens.max()))
        blocks = tables[row_of_token, positions // self._block_size]
        return ForwardBatch(
            token_ids=self._tensor(np.concatenate(token_ids)),
            positions=self._tensor(positions),
            slot_mapping=self._tensor(blocks * self._block_size + positions % self._block_size),
            rows=RowLayout(query_start_loc.tolist(), seq_lens.tolist(), self._tensor(tables)),
            logits_indices=self._tensor(_logits_indices(steps, query_start_loc)),
            lora=lora,
        )

    def _extend_block_table(self, step: RowStep) -> None:
        row = self._rows[step.slot]
        (new_block_ids,) = step.new_block_ids
        end = row.num_blocks + len(new_block_ids)
        self._block_tables[step.slot, row.num_blocks : end] = new_block_ids
        row.num_blocks = end
        assert step.start + step.num_tokens <= end * self._block_size, "a block is missing"

    def _tables(self, slots: Sequence[Slot], max_seq_len: int) -> IntArray:
        """[num rows, blocks of the longest row]"""
        return self._block_tables[list(slots), : -(-max_seq_len // self._block_size)]

    def _tensor(self, values: IntArray) -> torch.Tensor:
        return torch.from_numpy(values.astype(np.int64, copy=False)).to(self._device)


def _logits_indices(steps: Sequence[RowStep], query_start_loc: IntArray) -> IntArray:
    """The last num_logits_rows tokens of each row."""
    ends = query_start_loc[1:]
    return np.concatenate(
        [np.arange(end - num_logits_rows(step), end) for step, end in zip(steps, ends, strict=True)]
    )
