"""The rows that the runner keeps between steps, and the numbers of one step made from them.

Knows slots, block tables and positions; neither requests, nor adapters' weights, nor the model,
nor where the numbers go (`tensors`).
"""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from loraplex.core.adapter import AdapterHandle
from loraplex.core.cache import Blocks, CacheSpec, Cross, States
from loraplex.core.image import ImageSpan, images_in
from loraplex.core.plan import (
    NO_BLOCK,
    BlockId,
    CacheGroupId,
    Capacity,
    CellId,
    EncodeText,
    RotationBorder,
    RowAdded,
    RowStep,
    Slot,
)
from loraplex.execution.sampling.rows import num_logits_rows
from loraplex.models.batch import RotatedSpan

IntArray = npt.NDArray[np.int64]
RowAdapters = tuple[tuple[AdapterHandle, float], ...]
"""(handle, scale) of each adapter of one row."""


NewBlocks = tuple[Slot, tuple[tuple[int, list[BlockId]], ...]]
"""What was appended to the block tables of a row: in each cache group, from which index on."""


class EncodedSpan(NamedTuple):
    """Tokens of one row that rows of an encoded image take the place of."""

    first_token: int
    """Index in the batch of the first of them."""
    num_tokens: int
    cell: CellId
    first_row: int


@dataclasses.dataclass(slots=True, eq=False)
class _BatchRow:
    adapters: RowAdapters
    num_blocks: list[int]
    """Length of the table of each cache group."""
    rotation_length: int = 0
    """Zero: each position is rotated for its own length."""
    images: tuple[ImageSpan, ...] = ()
    encoder_token_ids: tuple[int, ...] = ()


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
    is_single: bool
    """Whether each row has one token."""


class StateIndices(NamedTuple):
    """Rows as groups of states need them: with all of their tokens, draft tokens included."""

    query_start_loc: IntArray  # [R + 1]
    slots: IntArray  # [R]
    reads: Mapping[CacheGroupId, IntArray]
    """State [R] that each row begins with, by cache group; NO_BLOCK: zero."""

    def of_rows(self, is_kept: npt.NDArray[np.bool_]) -> "StateIndices":
        counts = np.diff(self.query_start_loc)[is_kept]
        reads = {group: states[is_kept] for group, states in self.reads.items()}
        return StateIndices(np.concatenate(([0], counts.cumsum())), self.slots[is_kept], reads)


class EncoderLengths(NamedTuple):
    """What rows read in groups of an encoder's positions: each all of its own input."""

    groups: Collection[CacheGroupId]
    of_rows: list[int]  # R


class EncoderInput(NamedTuple):
    """Input of a row's encoder, which a step encodes."""

    slot: Slot
    token_ids: tuple[int, ...]  # T
    slot_mappings: tuple[IntArray, ...]
    """Place [T] of each position in each cache group; NO_BLOCK in groups of other positions."""
    adapters: RowAdapters


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class StepInputs:
    """The numbers of a step but for its tokens: some of them are sampled by the step before."""

    slots: IntArray  # [R]
    query_start_loc: list[int]  # R + 1
    seq_lens: list[int]  # R
    row_of_token: IntArray  # [T]
    positions: IntArray  # [T]
    slot_mappings: tuple[IntArray, ...]
    """Place [T] of each token in each cache group. In a group of states it is the block of the
    state that ends with the token; NO_BLOCK: none is written."""
    logits_indices: IntArray  # [S]
    block_tables: tuple[IntArray, ...]  # [R, most blocks of these rows] of each cache group
    new_blocks: tuple[NewBlocks, ...]
    adapters: tuple[RowAdapters, ...]  # of each step of a row
    rotated_spans: tuple[RotatedSpan, ...] = ()
    encoded_spans: tuple[EncodedSpan, ...] = ()
    state_rows: StateIndices | None = None
    """None: no cache group is read by whole rows."""
    encoder_lengths: EncoderLengths | None = None
    """None: no cache group has an encoder's positions."""
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

    def lengths_in(self, group: CacheGroupId) -> list[int]:
        """Return how many positions of a cache group each row has after the step."""
        lengths = self.encoder_lengths
        return self.seq_lens if lengths is None or group not in lengths.groups else lengths.of_rows

    def with_row_per_token(self) -> "StepInputs":
        """Return the step with a row for each token; `adapters` stay those of the original rows.

        A layer writes the KV of all tokens before it attends, so a token sees those before it. A
        state is no KV: no row reads what another one writes, so `state_rows` stay, too.
        """
        lengths = self.encoder_lengths
        if lengths is not None:
            of_rows = [lengths.of_rows[row] for row in self.row_of_token]
            lengths = lengths._replace(of_rows=of_rows)
        return dataclasses.replace(
            self,
            slots=self.slots[self.row_of_token],
            query_start_loc=list(range(self.num_tokens + 1)),
            seq_lens=(self.positions + 1).tolist(),
            row_of_token=np.arange(self.num_tokens),
            block_tables=tuple(tables[self.row_of_token] for tables in self.block_tables),
            encoder_lengths=lengths,
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
        encoded = [span for span in self.encoded_spans if tokens[span.first_token]]
        lengths = self.encoder_lengths
        if lengths is not None:
            lengths = lengths._replace(of_rows=[lengths.of_rows[row] for row in rows])
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
            encoded_spans=tuple(
                span._replace(first_token=int(places[span.first_token])) for span in encoded
            ),
            state_rows=None if self.state_rows is None else self.state_rows.of_rows(is_kept),
            encoder_lengths=lengths,
        )


def no_rows(
    num_cache_groups: int,
    states: Collection[CacheGroupId] | None = None,
    encoder_groups: Collection[CacheGroupId] = (),
) -> StepInputs:
    """Return the inputs of a step that computes nothing but padding.

    states: cache groups that keep states; None: none is read by whole rows. encoder_groups: those
    of an encoder's positions.
    """
    none = np.zeros(0, np.int64)
    return StepInputs(
        slots=none,
        query_start_loc=[0],
        seq_lens=[],
        row_of_token=none,
        positions=none,
        slot_mappings=(none,) * num_cache_groups,
        logits_indices=none,
        block_tables=(none.reshape(0, 0),) * num_cache_groups,
        new_blocks=(),
        adapters=(),
        state_rows=None
        if states is None
        else StateIndices(np.zeros(1, np.int64), none, dict.fromkeys(states, none)),
        encoder_lengths=EncoderLengths(encoder_groups, []) if encoder_groups else None,
    )


class InputBatch:
    """Block tables by slot; a plan contains only the blocks that are new.

    What the last step made is kept as far as the next one needs the same: while rows decode, the
    layout; while none of them takes a block, their block tables. The table of each cache group
    has its own length.
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        num_cache_groups: int = 1,
        rotation_border: RotationBorder | None = None,
        *,
        states: Mapping[CacheGroupId, int] | None = None,
        reads_images: bool = False,
        encoder_groups: Collection[CacheGroupId] = (),
        longest_encoder_input: int = 0,
    ) -> None:
        """states: positions between the states of each cache group that keeps them; None: no group
        is read by whole rows. reads_images: whether rows may have images; without them no step
        looks for any. encoder_groups: cache groups of positions of the encoder's inputs, which have
        at most so many tokens.
        """
        self._border = rotation_border
        self._block_size = block_size
        self._rows: dict[Slot, _BatchRow] = {}
        shape = (max_num_seqs, -(-max(max_model_len, longest_encoder_input) // block_size))
        self._block_tables: tuple[IntArray, ...] = tuple(
            np.zeros(shape, dtype=np.int64) for _ in range(num_cache_groups)
        )
        self._states = states or {}
        self._has_state_rows = states is not None
        self._reads_images = reads_images
        self._encoder_groups = frozenset(encoder_groups)
        self._layout: _Layout | None = None
        self._tables: tuple[IntArray, ...] = ()

    def add_row(self, row: RowAdded) -> None:
        assert row.slot not in self._rows, f"slot {row.slot} is taken"
        length = 0
        if self._border is not None:
            length = self._border.rotation_length(row.num_prompt_tokens, len(row.token_ids))
        num_blocks = [0] * len(self._block_tables)
        self._rows[row.slot] = _BatchRow(
            row.adapters, num_blocks, length, row.images, row.encoder_token_ids
        )

    def remove_row(self, slot: Slot) -> None:
        self._rows.pop(slot, None)

    def prepare(self, steps: Sequence[RowStep]) -> StepInputs:
        """The numbers of a step; steps are prepared in their order, whether they run or not."""
        layout = self._layout_of(steps)
        new_blocks = self._extend_block_tables(steps)
        if new_blocks or layout is not self._layout:
            lengths = zip(*(self._rows[step.slot].num_blocks for step in steps), strict=True)
            self._tables = tuple(
                tables[layout.slots, : max(of_group)]
                for tables, of_group in zip(self._block_tables, lengths, strict=True)
            )
        self._layout = layout
        starts = np.array([step.start for step in steps], dtype=np.int64)
        positions = starts
        if not layout.is_single:
            positions = starts[layout.row_of_token] + layout.token_in_row
        indices, offsets = np.divmod(positions, self._block_size)
        return StepInputs(
            slots=layout.slots,
            query_start_loc=layout.query_start_loc,
            seq_lens=[step.start + step.num_tokens for step in steps],
            row_of_token=layout.row_of_token,
            positions=positions,
            slot_mappings=tuple(
                self._state_places(group, layout, positions)
                if group in self._states
                else np.full(len(positions), NO_BLOCK)
                if group in self._encoder_groups
                else tables[layout.row_of_token, indices] * self._block_size + offsets
                for group, tables in enumerate(self._tables)
            ),
            logits_indices=layout.logits_indices,
            block_tables=self._tables,
            new_blocks=tuple(new_blocks),
            adapters=tuple(self._rows[step.slot].adapters for step in steps),
            rotated_spans=() if self._border is None else self._spans(steps, layout),
            encoded_spans=self._encoded_spans(steps, layout) if self._reads_images else (),
            state_rows=self._state_rows(layout, starts) if self._has_state_rows else None,
            encoder_lengths=self._encoder_lengths(steps) if self._encoder_groups else None,
        )

    def encoder_inputs(self, encodes: Sequence[EncodeText]) -> tuple[EncoderInput, ...]:
        """Return the inputs to encode, after `prepare` of the steps of their rows."""
        return tuple(self._encoder_input(encode.slot) for encode in encodes)

    def _encoder_input(self, slot: Slot) -> EncoderInput:
        row, size = self._rows[slot], self._block_size
        positions = np.arange(len(row.encoder_token_ids))
        mappings = []
        for group, (tables, num_blocks) in enumerate(
            zip(self._block_tables, row.num_blocks, strict=True)
        ):
            mapping = np.full(len(positions), NO_BLOCK)
            if group in self._encoder_groups:
                assert num_blocks * size >= len(positions), "a block is missing"
                mapping = tables[slot, positions // size] * size + positions % size
            mappings.append(mapping)
        return EncoderInput(slot, row.encoder_token_ids, tuple(mappings), row.adapters)

    def _encoder_lengths(self, steps: Sequence[RowStep]) -> EncoderLengths:
        lengths = [len(self._rows[step.slot].encoder_token_ids) for step in steps]
        return EncoderLengths(self._encoder_groups, lengths)

    def _state_places(self, group: CacheGroupId, layout: _Layout, positions: IntArray) -> IntArray:
        """Return the state [T] that is written after each token."""
        every = self._states[group]
        places = np.full(len(positions), NO_BLOCK)
        ends = np.flatnonzero((positions + 1) % every == 0)
        rows = layout.slots[layout.row_of_token[ends]]
        places[ends] = self._block_tables[group][rows, positions[ends] // every]
        return places

    def _state_rows(self, layout: _Layout, starts: IntArray) -> StateIndices:
        reads = {}
        for group, every in self._states.items():
            last = starts // every - 1
            states = self._block_tables[group][layout.slots, np.maximum(last, 0)]
            reads[group] = np.where(last < 0, NO_BLOCK, states)
        return StateIndices(np.array(layout.query_start_loc), layout.slots, reads)

    def _encoded_spans(self, steps: Sequence[RowStep], layout: _Layout) -> tuple[EncodedSpan, ...]:
        """Return the tokens that are positions of images."""
        spans = []
        for step, first_token in zip(steps, layout.query_start_loc, strict=False):
            if not step.image_cells:
                continue
            start, stop = step.start, step.start + step.num_tokens
            images = images_in(self._rows[step.slot].images, start, stop)
            for image, cell in zip(images, step.image_cells, strict=True):
                first = max(start, image.first)
                num_tokens = min(stop, image.end) - first
                place = first_token + first - start
                spans.append(EncodedSpan(place, num_tokens, cell, first - image.first))
        return tuple(spans)

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
            is_single=bool((counts == 1).all()),
        )

    def _extend_block_tables(self, steps: Sequence[RowStep]) -> list[NewBlocks]:
        """Append the new blocks; the result is StepInputs.new_blocks."""
        extended = []
        for step in steps:
            row = self._rows[step.slot]
            if any(step.new_block_ids):
                new_blocks = []
                groups = zip(self._block_tables, step.new_block_ids, row.num_blocks, strict=True)
                for group, (tables, block_ids, first) in enumerate(groups):
                    # Elsewhere a gap is a block that no position sees: any block will do.
                    least = NO_BLOCK if group in self._states else 0
                    known = [max(block_id, least) for block_id in block_ids]
                    tables[step.slot, first : first + len(known)] = known
                    new_blocks.append((first, known))
                row.num_blocks = [first + len(known) for first, known in new_blocks]
                extended.append((step.slot, tuple(new_blocks)))
            assert step.start + step.num_tokens <= self._num_positions(row), "a block is missing"
        return extended

    def _num_positions(self, row: _BatchRow) -> int:
        """Return how many positions of its own fit in the blocks of a row."""
        if not (self._states or self._encoder_groups):
            return min(row.num_blocks) * self._block_size
        return min(
            (num_blocks + 1) * self._states[group] - 1
            if group in self._states
            else num_blocks * self._block_size
            for group, num_blocks in enumerate(row.num_blocks)
            if group not in self._encoder_groups
        )


def groups_of_encoders(capacity: Capacity) -> tuple[CacheGroupId, ...]:
    """Return the cache groups of positions of an encoder's input."""
    groups = enumerate(capacity.cache_groups)
    return tuple(group for group, of_group in groups if isinstance(of_group.spec, Cross))


def groups_of_states(capacity: Capacity) -> dict[CacheGroupId, int] | None:
    """Return `states_of` the cache groups of a capacity."""
    return states_of([group.spec for group in capacity.cache_groups])


def states_of(specs: Sequence[CacheSpec]) -> dict[CacheGroupId, int] | None:
    """Return the cache groups that keep states, with the positions between two of them.

    None: nothing is read by whole rows. specs: of all groups.
    """
    groups = {group: spec.every for group, spec in enumerate(specs) if isinstance(spec, States)}
    by_rows = any(isinstance(spec, Blocks) and spec.by_rows for spec in specs)
    return groups if groups or by_rows else None
