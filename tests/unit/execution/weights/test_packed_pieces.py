"""The packed file is written in pieces that fill large pages."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from loraplex.execution.weights import packed_file


@given(st.lists(st.binary(max_size=40), max_size=12), st.integers(0, 50))
def test_pieces_end_at_borders_of_the_file(parts: list[bytes], start: int) -> None:
    num_bytes = 16
    pieces = list(packed_file.in_pieces(parts, start, num_bytes))
    assert b"".join(pieces) == b"".join(parts)
    *ends, end = itertools.accumulate(map(len, pieces), initial=start)
    assert all(border % num_bytes == 0 for border in ends[1:])
    assert len(ends) - 1 == end // num_bytes - start // num_bytes


def test_a_piece_fills_large_pages_whole() -> None:
    assert packed_file.PIECE_BYTES % (2 << 20) == 0
