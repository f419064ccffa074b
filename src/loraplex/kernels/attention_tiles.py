"""How the reference attention cuts a step into pieces of equal shape. Scalars in, indices out.

A query at position p reads keys in a range that depends on p alone: up to the next of a fixed row
of lengths (`key_range`); if attention is not causal, on the row's length, too. Queries of equal
range form tiles, tiles of equal shape form one group and are computed together. So the sums of a
token do not depend on the other rows, nor on how its prompt was cut into chunks.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence

_MIN_STEP = 64
_STEPS_PER_OCTAVE = 4
_MAX_TILE_QUERIES = 64
_MAX_GATHERED_KEYS = 16_384  # per group: bounds the memory for the gathered keys and values


@dataclasses.dataclass(frozen=True, slots=True)
class Tile:
    """Queries of one row that read the same range of keys."""

    row: int
    first_token: int
    """Index in the batch."""
    first_position: int
    num_queries: int
    seq_len: int
    """Number of keys of the row; the range may reach beyond."""


@dataclasses.dataclass(frozen=True, slots=True)
class TokenWindow:
    """What a position p sees: p - num_tokens + 1 .. p, and 0 .. num_sink_tokens - 1 before it.

    And if attention is not causal, the later positions up to p + num_tokens - 1.
    """

    num_tokens: int | None
    """None: everything before it."""
    num_sink_tokens: int = 0
    is_causal: bool = True

    def first(self, position: int) -> int:
        """Where the keys that are no sinks begin."""
        return 0 if self.num_tokens is None else max(0, position - self.num_tokens + 1)

    def end(self, position: int, seq_len: int) -> int:
        """Where the keys end, in a row of so many."""
        if self.is_causal:
            return position + 1
        return seq_len if self.num_tokens is None else min(seq_len, position + self.num_tokens)


@dataclasses.dataclass(frozen=True, slots=True)
class TileShape:
    num_sink_blocks: int
    """Read in front of the key range; none if that begins within the sinks."""
    first_block: int
    """First block of the key range, in the rows' block tables."""
    num_blocks: int
    """Number of blocks of the key range."""
    num_queries: int
    """Padded."""


@dataclasses.dataclass(frozen=True, slots=True)
class TileGroup:
    shape: TileShape
    tiles: tuple[Tile, ...]


def key_range(position: int) -> tuple[int, int]:
    """(first, end): the queries at positions first .. end - 1 read keys up to `end`.

    Steps of 64 up to 256 keys, then four steps per doubling: at most a quarter is read in vain.
    """
    octave = 1 << (position.bit_length() - 1) if position else 1
    step = max(_MIN_STEP, octave // _STEPS_PER_OCTAVE)
    first = position // step * step
    return first, first + step


def tile_groups(
    query_start_loc: Sequence[int],
    seq_lens: Sequence[int],
    *,
    block_size: int,
    window: TokenWindow,
    query_multiple: int,
) -> list[TileGroup]:
    """Cut the rows of a step (as in RowLayout); numbers of queries are padded to the multiple."""
    by_shape: dict[TileShape, list[Tile]] = {}
    for row, seq_len in enumerate(seq_lens):
        first_token = query_start_loc[row]
        start = seq_len - (query_start_loc[row + 1] - first_token)
        for first, end, tile_range in _tiles(start, seq_len):
            tile = Tile(row, first_token + first - start, first, end - first, seq_len)
            last_key = window.end(tile_range[1] - 1, seq_len) - 1
            keys = (window.first(tile_range[0]), key_range(max(0, last_key))[1])
            shape = _shape(keys, end - first, block_size, window, query_multiple)
            by_shape.setdefault(shape, []).append(tile)
    return [
        group
        for shape, tiles in by_shape.items()
        for group in _bounded_groups(shape, tiles, block_size)
    ]


def _tiles(start: int, end: int) -> Iterator[tuple[int, int, tuple[int, int]]]:
    """(first position, end position, key range) of the tiles of one row."""
    while start < end:
        tile_range = key_range(start)
        tile_end = min(end, tile_range[1], start + _MAX_TILE_QUERIES)
        yield start, tile_end, tile_range
        start = tile_end


def _shape(
    keys: tuple[int, int],
    num_queries: int,
    block_size: int,
    window: TokenWindow,
    query_multiple: int,
) -> TileShape:
    first, end = keys
    first_block = first // block_size
    num_sink_blocks = min(first_block, -(-window.num_sink_tokens // block_size))
    num_blocks = -(-end // block_size) - first_block
    num_padded = math.ceil(num_queries / query_multiple) * query_multiple
    return TileShape(num_sink_blocks, first_block, num_blocks, num_padded)


def _bounded_groups(shape: TileShape, tiles: list[Tile], block_size: int) -> Iterator[TileGroup]:
    num_keys = (shape.num_sink_blocks + shape.num_blocks) * block_size
    size = max(1, _MAX_GATHERED_KEYS // num_keys)
    for first in range(0, len(tiles), size):
        yield TileGroup(shape, tuple(tiles[first : first + size]))
