"""Brings the numbers of a step to the device, as the decoder takes them.

`HostTensors` serves a CPU, and any device that torch alone drives; `DeviceTensors` an accelerator:
nothing of it waits, and a step like one before it finds its numbers at the same addresses.
"""

import itertools
from collections.abc import Sequence
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from loraplex.core.plan import NO_BLOCK, CacheGroupId, Capacity
from loraplex.execution.mirror import Array, Mirror, num_bytes_of
from loraplex.execution.sampling.pending_samples import TokenFeed
from loraplex.execution.steps.input_batch import (
    EncoderInput,
    IntArray,
    StateIndices,
    StepInputs,
    groups_of_encoders,
    groups_of_states,
)
from loraplex.kernels.accelerator import Accelerator
from loraplex.kernels.lora import LoraBatch
from loraplex.kernels.ops import DeviceRows, RowLayout
from loraplex.models.batch import ForwardBatch, StateRows

ON_DEVICE = -1
"""Stands for a token that the host does not know yet: the newest one of the row's slot."""
_Array = TypeVar("_Array", npt.NDArray[np.int64], npt.NDArray[np.int32])


class StepTensors(Protocol):
    def batch(
        self,
        inputs: StepInputs,
        token_ids: Sequence[Sequence[int]],
        lora: LoraBatch | None,
    ) -> ForwardBatch:
        """Make the tensors. token_ids: of each row, those that it computes."""
        ...

    def encoder_batch(self, given: EncoderInput, lora: LoraBatch | None) -> ForwardBatch:
        """Make the tensors of one input of an encoder, whose positions are one row.

        It has no block tables: layers read nothing of the cache, and write by slot_mappings.
        """
        ...


class HostTensors:
    """Implements StepTensors: tensors are the arrays themselves, or copies of them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_host = device.type == "cpu"
        self._tables: tuple[IntArray, ...] = ()
        self._table_tensors: tuple[torch.Tensor, ...] = ()
        """Block tables of the last step: `InputBatch` keeps them while no row takes a block."""

    def batch(
        self, inputs: StepInputs, token_ids: Sequence[Sequence[int]], lora: LoraBatch | None
    ) -> ForwardBatch:
        """Knows neither padding nor tokens that are ON_DEVICE."""
        tokens = np.array(list(itertools.chain(*token_ids)), dtype=np.int64)
        if inputs.block_tables is not self._tables:
            self._tables = inputs.block_tables
            self._table_tensors = tuple(map(self._tensor, self._tables))
        return ForwardBatch(
            token_ids=self._tensor(tokens),
            positions=self._tensor(inputs.positions),
            slot_mappings=tuple(map(self._tensor, inputs.slot_mappings)),
            rows=tuple(
                RowLayout(inputs.query_start_loc, inputs.lengths_in(group), tables)
                for group, tables in enumerate(self._table_tensors)
            ),
            logits_indices=self._tensor(inputs.logits_indices),
            lora=lora,
            rotated_spans=inputs.rotated_spans,
            state_rows=self._state_rows(inputs),
        )

    def encoder_batch(self, given: EncoderInput, lora: LoraBatch | None) -> ForwardBatch:
        return _encoder_batch(list(map(self._tensor, _encoder_arrays(given))), lora)

    def _state_rows(self, inputs: StepInputs) -> StateRows | None:
        """A step that may be repeated has a row for each token, as its record needs one size."""
        rows = inputs.state_rows
        if rows is None:
            return None
        num_rows = inputs.num_tokens if inputs.wants_all_logits else len(rows.slots)
        query_starts, reads = _with_empty_rows(rows, num_rows)
        # The table of row r is row r. Rows that are too many have none, and do not read one.
        numbers = np.arange(num_rows)
        starts = {
            group: self._tensor(numbers * tables.shape[1])
            for group, tables in enumerate(inputs.block_tables)
        }
        tensors = {group: self._tensor(states) for group, states in reads.items()}
        return StateRows(self._tensor(query_starts), tensors, starts)

    def _tensor(self, values: IntArray) -> torch.Tensor:
        tensor = torch.from_numpy(values)
        return tensor if self._is_host else tensor.to(self._device)


class DeviceTensors:
    """Implements StepTensors, within accelerator.compute().

    What it gave is overwritten, in the order of the compute queue, by what it gives next.
    """

    def __init__(
        self, accelerator: Accelerator, feed: TokenFeed, capacity: Capacity, num_recorded: int
    ) -> None:
        """num_recorded: tokens of the largest step whose addresses stay."""
        device = accelerator.device
        self._num_slots = capacity.max_num_seqs
        self._num_recorded = num_recorded
        self._newest = feed.newest
        max_positions = max(capacity.max_model_len, capacity.longest_encoder_input)
        self._max_blocks = -(-max_positions // capacity.block_size)
        num_groups = len(capacity.cache_groups)
        # The last row is the table of rows that have no tokens.
        num_entries = (self._num_slots + 1) * self._max_blocks
        stride = -(-num_entries // _TABLE_ALIGNMENT) * _TABLE_ALIGNMENT
        self._first_entries = [group * stride for group in range(num_groups)]
        """Where the tables of each cache group begin."""
        self._entries = torch.zeros(
            self._first_entries[-1] + num_entries, dtype=torch.int32, device=device
        )
        """Block tables of all cache groups, so that one launch writes what is new in any."""
        self._block_tables = tuple(
            self._entries[first : first + num_entries].view(-1, self._max_blocks)
            for first in self._first_entries
        )
        self._no_tables = torch.zeros((0, 0), dtype=torch.int64, device=device)
        self._places = torch.arange(num_recorded, device=device)
        self._token_ids = torch.zeros(num_recorded, dtype=torch.int64, device=device)
        self._most_new_blocks = num_recorded * num_groups
        states = groups_of_states(capacity)
        self._states = tuple(states or ())
        self._has_state_rows = states is not None
        num_arrays = len(self._states) + 2 if self._has_state_rows else 0
        state_capacities = [num_recorded + 1] * num_arrays
        self._encoder_groups = groups_of_encoders(capacity)
        encoder_capacities = [num_recorded] if self._encoder_groups else []
        self._capacities = (
            *(*state_capacities, *encoder_capacities),
            *[num_recorded] * (num_groups + 4),
            *(num_recorded + 1, num_recorded, num_recorded),
            *[self._most_new_blocks] * 2,
        )
        # Sizes of the numbers of _arrays.
        itemsizes = (
            *[8] * len(state_capacities),
            *[4] * len(encoder_capacities),
            *(*[8] * (num_groups + 4), 4, 4, 4, 4, 8),
        )
        self._recorded = Mirror(accelerator, num_bytes_of(self._capacities, itemsizes))
        self._others = Mirror(accelerator, 0)

    def batch(
        self, inputs: StepInputs, token_ids: Sequence[Sequence[int]], lora: LoraBatch | None
    ) -> ForwardBatch:
        arrays = self._arrays(inputs, token_ids)
        num_tokens = inputs.num_tokens + inputs.num_padding
        stays = num_tokens <= self._num_recorded and arrays[-1].size <= self._most_new_blocks
        if stays:
            tensors = self._recorded.send(arrays, self._capacities)
        else:
            tensors = self._others.send(arrays)
        state_rows = None
        if self._has_state_rows:
            query_starts, starts, *reads = tensors[: len(self._states) + 2]
            state_rows = StateRows(
                query_starts,
                dict(zip(self._states, reads, strict=True)),
                dict.fromkeys(range(len(self._block_tables)), starts),
            )
            tensors = tensors[len(self._states) + 2 :]
        lengths: dict[int, torch.Tensor] = {}
        if self._encoder_groups:
            of_inputs, *tensors = tensors
            lengths = dict.fromkeys(self._encoder_groups, of_inputs)
        positions, *slot_mappings, sources, given, wanted = tensors[:-5]
        query_start_loc, seq_lens, table_rows, blocks, places = tensors[-5:]
        if len(places):
            self._entries.index_copy_(0, places, blocks)
        tokens = self._token_ids[:num_tokens] if stays else torch.empty_like(given)
        torch.maximum(self._newest.index_select(0, sources), given, out=tokens)
        rows = tuple(
            RowLayout(
                inputs.query_start_loc,
                inputs.lengths_in(group),
                self._no_tables,
                DeviceRows(query_start_loc, lengths.get(group, seq_lens), table_rows, tables),
            )
            for group, tables in enumerate(self._block_tables)
        )
        return ForwardBatch(
            token_ids=tokens,
            positions=positions,
            slot_mappings=tuple(slot_mappings),
            rows=rows,
            logits_indices=self._places[:num_tokens] if inputs.num_padding else wanted,
            lora=lora,
            rotated_spans=inputs.rotated_spans,
            state_rows=state_rows,
        )

    def encoder_batch(self, given: EncoderInput, lora: LoraBatch | None) -> ForwardBatch:
        return _encoder_batch(self._others.send(_encoder_arrays(given)), lora)

    def _arrays(self, inputs: StepInputs, token_ids: Sequence[Sequence[int]]) -> list[Array]:
        """Padding is token 0 at position 0, which is written nowhere, of rows without tokens."""
        num_padding, num_tokens = inputs.num_padding, inputs.num_tokens
        tokens = np.fromiter(itertools.chain.from_iterable(token_ids), np.int64, num_tokens)
        sources = np.where(tokens == ON_DEVICE, inputs.slots[inputs.row_of_token], self._num_slots)
        blocks, places = self._new_blocks(inputs)
        return [
            *self._state_arrays(inputs),
            *(
                _padded(_narrow(inputs.lengths_in(group)), num_padding, 0)
                for group in self._encoder_groups[:1]
            ),
            _padded(inputs.positions, num_padding, 0),
            *(_padded(mapping, num_padding, -1) for mapping in inputs.slot_mappings),
            _padded(sources, num_padding, self._num_slots),
            # The greater of a token and what stands for none is the token.
            _padded(np.maximum(tokens, 0), num_padding, 0),
            inputs.logits_indices,
            _padded(_narrow(inputs.query_start_loc), num_padding, num_tokens),
            _padded(_narrow(inputs.seq_lens), num_padding, 0),
            _padded(_narrow(inputs.slots), num_padding, self._num_slots),
            blocks,
            places,
        ]

    def _state_arrays(self, inputs: StepInputs) -> list[Array]:
        """A step has as many rows here as elsewhere: those that are too many have no tokens."""
        rows = inputs.state_rows
        if rows is None:
            return []
        num_rows = len(inputs.seq_lens) + inputs.num_padding
        query_starts, reads = _with_empty_rows(rows, num_rows)
        slots = _padded(rows.slots, num_rows - len(rows.slots), self._num_slots)
        return [
            query_starts,
            slots * self._max_blocks,
            *(reads[group] for group in self._states),
        ]

    def _new_blocks(self, inputs: StepInputs) -> tuple[npt.NDArray[np.int32], IntArray]:
        """Return the new blocks, and their places among the entries of all block tables."""
        none = np.zeros(0, np.int64)
        blocks, places = [_narrow(none)], [none]
        for slot, new_blocks in inputs.new_blocks:
            for first_entry, (first, of_group) in zip(self._first_entries, new_blocks, strict=True):
                place = first_entry + slot * self._max_blocks + first
                places.append(np.arange(place, place + len(of_group)))
                blocks.append(_narrow(of_group))
        return np.concatenate(blocks), np.concatenate(places)


def _encoder_arrays(given: EncoderInput) -> list[IntArray]:
    """Return what `_encoder_batch` gets as tensors."""
    tokens = np.array(given.token_ids, np.int64)
    return [tokens, np.arange(len(tokens)), *given.slot_mappings]


def _encoder_batch(tensors: Sequence[torch.Tensor], lora: LoraBatch | None) -> ForwardBatch:
    token_ids, positions, *slot_mappings = tensors
    num_tokens = len(token_ids)
    rows = RowLayout([0, num_tokens], [num_tokens], token_ids.new_zeros((1, 0)))
    return ForwardBatch(
        token_ids=token_ids,
        positions=positions,
        slot_mappings=tuple(slot_mappings),
        rows=(rows,) * len(slot_mappings),
        logits_indices=positions[:0],
        lora=lora,
    )


_TABLE_ALIGNMENT = 64
"""Entries: the block tables of every cache group begin at a multiple of it, for wide loads."""


def _with_empty_rows(
    rows: StateIndices, num_rows: int
) -> tuple[IntArray, dict[CacheGroupId, IntArray]]:
    """Return query_start_loc and reads with rows that have no tokens, up to num_rows."""
    num_more = num_rows - len(rows.slots)
    starts = _padded(rows.query_start_loc, num_more, int(rows.query_start_loc[-1]))
    return starts, {
        group: _padded(states, num_more, NO_BLOCK) for group, states in rows.reads.items()
    }


def _narrow(values: Sequence[int] | IntArray) -> npt.NDArray[np.int32]:
    return np.array(values, np.int32)


def _padded(values: _Array, num_padding: int, fill: int) -> _Array:
    if not num_padding:
        return values
    return np.concatenate((values, np.full(num_padding, fill, values.dtype)))
