"""Sequences whose positions lie in blocks of a pool, and the rows of steps that compute them."""

import random
from collections.abc import Sequence

import torch

from loraplex.kernels.states import StoredRows

RowSpan = tuple[int, int, int]
"""Sequence, first position, number of tokens: what a row of a step computes."""


class StoredPositions:
    """Block tables of sequences, whose blocks are shuffled."""

    def __init__(self, lengths: Sequence[int], block_size: int) -> None:
        self.block_size = block_size
        sizes = [-(-length // block_size) for length in lengths]
        self.num_blocks = sum(sizes) + 1
        blocks = random.Random(str(lengths)).sample(range(1, self.num_blocks), sum(sizes))
        self._width = max(sizes)
        self.tables: list[list[int]] = []
        for size in sizes:
            self.tables.append(blocks[:size])
            blocks = blocks[size:]

    def place(self, sequence: int, position: int) -> int:
        block = self.tables[sequence][position // self.block_size]
        return block * self.block_size + position % self.block_size

    def rows(
        self, spans: Sequence[RowSpan], num_padding: int = 0, num_empty_rows: int = 0
    ) -> StoredRows:
        """Return the rows of a step. Those without tokens, and padding, are at its end."""
        starts, positions, places = [0], list[int](), list[int]()
        for sequence, first, num_tokens in spans:
            span = range(first, first + num_tokens)
            positions += span
            places += [self.place(sequence, position) for position in span]
            starts.append(len(positions))
        tables = [
            (self.tables[sequence] + [0] * self._width)[: self._width] for sequence, *_ in spans
        ]
        return StoredRows(
            torch.tensor(starts + starts[-1:] * num_empty_rows),
            torch.tensor(positions + [0] * num_padding),
            torch.tensor(places + [-1] * num_padding),
            torch.arange(len(spans) + num_empty_rows) * self._width,
            torch.tensor(tables, dtype=torch.int64).flatten(),
        )


def spans_of(lengths: Sequence[int], cuts: Sequence[int]) -> list[list[RowSpan]]:
    """Return steps in which all sequences go on together, in chunks of these sizes by turns."""
    steps, done, turn = [], [0] * len(lengths), 0
    while any(before < length for before, length in zip(done, lengths, strict=True)):
        step = []
        for sequence, length in enumerate(lengths):
            num_tokens = min(cuts[(turn + sequence) % len(cuts)], length - done[sequence])
            if num_tokens:
                step.append((sequence, done[sequence], num_tokens))
                done[sequence] += num_tokens
        steps.append(step)
        turn += 1
    return steps
