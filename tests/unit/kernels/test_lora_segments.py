"""Every token meets every one of its adapters in exactly one piece."""

import collections

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from loraplex.kernels.lora import (
    FEW_TOKENS,
    MOST_REPEATED_TOKENS,
    LoraBatch,
    LoraCells,
    LoraSegments,
    LoraTable,
    LoraUse,
    lora_batch,
    lora_segments,
)

EMPTY = np.zeros((9, 1))
TABLE = LoraTable(
    LoraCells([{"q_proj": (8, 8)}]),
    EMPTY.astype(np.int64),
    EMPTY.astype(np.int32),
    EMPTY.astype(np.float32),
)

rows = st.lists(
    st.tuples(
        st.integers(1, 40),
        st.lists(st.tuples(st.integers(0, 8), st.sampled_from([0.25, 1.0, 3.0])), max_size=3),
    ),
    min_size=1,
    max_size=12,
)


def uses_of(rows) -> tuple[list[LoraUse], int]:
    uses, first = [], 0
    for num_tokens, adapters in rows:
        for wave, (entry, scale) in enumerate(adapters):
            uses.append(LoraUse(wave, entry, first, num_tokens, scale))
        first += num_tokens
    return uses, first


def batch_of(uses) -> LoraBatch:
    return lora_batch(torch.zeros(1), TABLE, uses)


def applied(segments: LoraSegments) -> dict[int, list[tuple[int, int, float]]]:
    """Return (wave, entry, scale)s by token, in the order in which a kernel adds them."""
    of_token = collections.defaultdict(list)
    for wave, pieces in enumerate(segments.entries.tolist()):
        for piece, entry in enumerate(pieces):
            start, count = int(segments.starts[wave, piece]), int(segments.counts[wave, piece])
            assert (count > 0) == (entry >= 0)
            assert count <= segments.longest
            for slot in range(start, start + count):
                token = int(segments.token_indices[slot])
                of_token[token].append((wave, entry, float(segments.token_scales[slot])))
    return of_token


@given(rows, st.sampled_from([None, 1, 4, 16, 64]), st.integers(0, 5))
def test_each_token_meets_its_adapters_once_and_in_their_order(rows, longest, padding):
    uses, num_tokens = uses_of(rows)
    expected = collections.defaultdict(list)
    for use in sorted(uses):
        for token in range(use.first_token, use.first_token + use.num_tokens):
            expected[token].append((use.wave, use.entry, use.scale))
    segments = lora_segments(batch_of(uses), num_tokens + padding, longest)
    assert applied(segments) == expected


@given(rows, st.integers(0, 5))
def test_shapes_of_short_pieces_are_those_of_the_step_s_size(rows, padding):
    uses, num_tokens = uses_of(rows)
    batch = batch_of(uses)
    segments = lora_segments(batch, num_tokens + padding, FEW_TOKENS)
    assert segments.entries.shape == (batch.num_waves, num_tokens + padding)
    assert segments.token_indices.shape == (batch.num_waves * (num_tokens + padding),)


@given(rows)
def test_a_copy_of_the_packed_array_is_the_same_segments(rows):
    uses, num_tokens = uses_of(rows)
    segments = lora_segments(batch_of(uses), num_tokens)
    copy = segments.at(segments.packed.clone())
    segments.packed.fill_(-7)
    assert applied(copy) == applied(lora_segments(batch_of(uses), num_tokens))


def test_each_array_begins_where_sixteen_bytes_do():
    segments = lora_segments(batch_of([LoraUse(0, 0, 0, 3, 1.0)]), 3)
    views = (segments.starts, segments.counts, segments.token_indices, segments.token_scales)
    assert [(view.data_ptr() - segments.packed.data_ptr()) % 16 for view in views] == [0] * 4


@pytest.mark.parametrize(
    ("num_tokens", "largest", "longest"),
    [
        (MOST_REPEATED_TOKENS, 200, FEW_TOKENS),
        (MOST_REPEATED_TOKENS + 1, 16, 16),
        (MOST_REPEATED_TOKENS + 1, 17, 32),
        (2000, 33, 64),
        (2000, 1900, 64),
    ],
)
def test_a_large_step_has_the_shortest_pieces_that_its_largest_group_fits_into(
    num_tokens, largest, longest
):
    uses = [LoraUse(0, 0, 0, largest, 1.0), LoraUse(0, 1, largest, 1, 1.0)]
    assert lora_segments(batch_of(uses), num_tokens).longest == longest


def test_a_batch_without_groups_has_empty_pieces():
    nothing = LoraBatch(
        torch.zeros(1),
        TABLE,
        np.zeros(0, np.int64),
        np.zeros(1, np.int64),
        np.zeros(2, np.int64),
        torch.zeros(0, dtype=torch.int64),
        torch.zeros(0),
    )
    segments = lora_segments(nothing, 8)
    assert segments.entries.tolist() == [[-1] * 8]
    assert segments.counts.sum() == 0
