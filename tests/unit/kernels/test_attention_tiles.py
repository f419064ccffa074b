"""Every query is in exactly one tile, reads all the keys it may see, in a range that is its own."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.kernels.attention_tiles import TileGroup, TokenWindow, key_range, tile_groups

BLOCK_SIZE = 16


def groups_of(
    rows: list[tuple[int, int]],
    *,
    window: TokenWindow = TokenWindow(None),  # noqa: B008
    query_multiple: int = 4,
) -> list[TileGroup]:
    """rows: (start, num_tokens)"""
    counts = itertools.accumulate((count for _, count in rows), initial=0)
    return tile_groups(
        list(counts),
        [start + count for start, count in rows],
        block_size=BLOCK_SIZE,
        window=window,
        query_multiple=query_multiple,
    )


WINDOWS = st.builds(TokenWindow, st.none() | st.integers(1, 500), st.integers(0, 300))


@pytest.mark.parametrize(
    ("position", "expected"),
    [
        (0, (0, 64)),
        (63, (0, 64)),
        (64, (64, 128)),
        (255, (192, 256)),
        (511, (448, 512)),
        (512, (512, 640)),
        (1023, (896, 1024)),
        (1024, (1024, 1280)),
    ],
)
def test_key_range(position: int, expected: tuple[int, int]) -> None:
    assert key_range(position) == expected


@given(st.integers(0, 1 << 20))
def test_positions_of_one_range_agree_and_little_is_wasted(position: int) -> None:
    first, end = key_range(position)
    assert first <= position < end
    assert key_range(first) == key_range(end - 1) == (first, end)
    assert end - position <= max(64, position // 4)


@given(
    rows=st.lists(st.tuples(st.integers(0, 3000), st.integers(1, 300)), min_size=1, max_size=6),
    window=WINDOWS,
    query_multiple=st.sampled_from([1, 2, 8]),
)
def test_each_query_once_with_all_its_keys(
    rows: list[tuple[int, int]], window: TokenWindow, query_multiple: int
) -> None:
    seen = []
    first_tokens = list(itertools.accumulate((count for _, count in rows), initial=0))
    for group in groups_of(rows, window=window, query_multiple=query_multiple):
        shape = group.shape
        assert shape.num_queries % query_multiple == 0
        for tile in group.tiles:
            assert 0 < tile.num_queries <= shape.num_queries
            start, count = rows[tile.row]
            assert tile.seq_len == start + count
            for offset in range(tile.num_queries):
                position = tile.first_position + offset
                assert tile.first_token + offset - first_tokens[tile.row] == position - start
                assert shape.first_block * BLOCK_SIZE <= window.first(position)
                assert position < (shape.first_block + shape.num_blocks) * BLOCK_SIZE
                num_apart = shape.num_sink_blocks * BLOCK_SIZE
                num_sinks = min(window.num_sink_tokens, shape.first_block * BLOCK_SIZE)
                assert num_sinks <= num_apart < num_sinks + BLOCK_SIZE
                seen.append((tile.row, position))
    expected = [(row, start + i) for row, (start, count) in enumerate(rows) for i in range(count)]
    assert sorted(seen) == expected


@given(st.integers(0, 2000), WINDOWS)
def test_the_key_range_is_the_same_in_any_company(position: int, window: TokenWindow) -> None:
    def keys(rows: list[tuple[int, int]], row: int) -> tuple[int, int, int]:
        for group in groups_of(rows, window=window):
            for tile in group.tiles:
                if tile.row == row and 0 <= position - tile.first_position < tile.num_queries:
                    shape = group.shape
                    return shape.num_sink_blocks, shape.first_block, shape.num_blocks
        raise AssertionError("no tile has the query")

    alone = keys([(position, 1)], 0)
    assert keys([(0, position + 50)], 0) == alone
    assert keys([(17, 900), (max(0, position - 30), 31 + 30)], 1) == alone


def test_rows_of_equal_shape_are_computed_together() -> None:
    (group,) = groups_of([(10, 1), (40, 1), (63, 1)])
    assert [tile.row for tile in group.tiles] == [0, 1, 2]


def test_the_gathered_keys_of_a_group_are_bounded() -> None:
    groups = groups_of([(4000, 1)] * 9)
    assert [len(group.tiles) for group in groups] == [4, 4, 1]
