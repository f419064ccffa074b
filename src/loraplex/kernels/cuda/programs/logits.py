"""What the programs of sampling share, and argmax and bitmask.

A row of logits is split among programs: split s has the tokens s * SPLIT .. (s + 1) * SPLIT - 1.
The splits depend on the vocabulary alone, so a row's bits do not depend on the other rows.
"""

import triton
import triton.language as tl

NAN_KEY: tl.constexpr = tl.constexpr(0x7FFFFFFF)


@triton.jit
def ordered(logits):
    """int32 that are ordered as the float32 logits are; both zeros are one. No NaN."""
    bits = tl.where(logits == 0.0, 0.0, logits).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def unordered(keys):
    """The float32 of the int32 of `ordered`; NaN of NAN_KEY."""
    return (keys ^ ((keys >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _keys(logits):
    return tl.where(logits == logits, ordered(logits), NAN_KEY)


@triton.jit
def row_of(rows, index):
    """Which row of the logits the index-th one is, int64. rows None: they are the first ones."""
    if rows is None:
        return index.to(tl.int64)
    else:
        return tl.load(rows + index)


@triton.jit
def argmax_of_splits(
    keys,
    token_ids,
    logits,
    rows,
    row_stride,
    VOCAB: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """keys, token_ids [n, splits] int32: the largest of each split. Grid: (n, splits)."""
    index, split = tl.program_id(0), tl.program_id(1)
    logits += row_of(rows, index) * row_stride
    offsets = tl.arange(0, BLOCK)
    best = tl.full((BLOCK,), -0x80000000, tl.int32)
    best_ids = offsets + split * SPLIT
    for first in range(0, SPLIT, BLOCK):
        ids = split * SPLIT + first + offsets
        is_token = ids < VOCAB
        found = tl.load(logits + ids, mask=is_token, other=0.0).to(tl.float32)
        found_keys = tl.where(is_token, _keys(found), -0x80000000)
        is_better = found_keys > best
        best = tl.where(is_better, found_keys, best)
        best_ids = tl.where(is_better, ids, best_ids)
    largest = tl.max(best, 0)
    place = index.to(tl.int64) * tl.num_programs(1) + split
    tl.store(keys + place, largest)
    tl.store(token_ids + place, tl.min(tl.where(best == largest, best_ids, 0x7FFFFFFF), 0))


@triton.jit
def argmax_of_rows(
    maxima, token_ids, keys, split_ids, NUM_SPLITS: tl.constexpr, BLOCK: tl.constexpr
):
    """maxima [n] float32, token_ids [n] int64, of keys, split_ids [n, NUM_SPLITS]. Grid: (n,)."""
    index = tl.program_id(0)
    splits = tl.arange(0, BLOCK)
    is_split = splits < NUM_SPLITS
    places = index.to(tl.int64) * NUM_SPLITS + splits
    found = tl.load(keys + places, mask=is_split, other=-0x80000000)
    ids = tl.load(split_ids + places, mask=is_split, other=0x7FFFFFFF)
    largest = tl.max(found, 0)
    tl.store(maxima + index, unordered(largest))
    token_id = tl.min(tl.where((found == largest) & is_split, ids, 0x7FFFFFFF), 0)
    tl.store(token_ids + index, token_id.to(tl.int64))


@triton.jit
def extremes_of_splits(
    maxima,
    minima,
    logits,
    rows,
    row_stride,
    VOCAB: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """maxima, minima [n, splits] float32, minima of what is not -inf. Grid: (n, splits)."""
    index, split = tl.program_id(0), tl.program_id(1)
    logits += row_of(rows, index) * row_stride
    offsets = tl.arange(0, BLOCK)
    most = tl.full((BLOCK,), -float("inf"), tl.float32)
    least = tl.full((BLOCK,), float("inf"), tl.float32)
    for first in range(0, SPLIT, BLOCK):
        ids = split * SPLIT + first + offsets
        found = tl.load(logits + ids, mask=ids < VOCAB, other=-float("inf"))
        most = tl.maximum(most, found)
        least = tl.minimum(least, tl.where(found > -float("inf"), found, float("inf")))
    place = index.to(tl.int64) * tl.num_programs(1) + split
    tl.store(maxima + place, tl.max(most, 0))
    tl.store(minima + place, tl.min(least, 0))


@triton.jit
def maximum_of(maxima, index, NUM_SPLITS: tl.constexpr, BLOCK: tl.constexpr):
    """Maximum of the index-th row, from maxima [n, NUM_SPLITS]."""
    splits = tl.arange(0, BLOCK)
    places = maxima + index.to(tl.int64) * NUM_SPLITS + splits
    return tl.max(tl.load(places, mask=splits < NUM_SPLITS, other=-float("inf")), 0)


@triton.jit
def minimum_of(minima, index, NUM_SPLITS: tl.constexpr, BLOCK: tl.constexpr):
    """Minimum of the index-th row, from minima [n, NUM_SPLITS]."""
    splits = tl.arange(0, BLOCK)
    places = minima + index.to(tl.int64) * NUM_SPLITS + splits
    return tl.min(tl.load(places, mask=splits < NUM_SPLITS, other=float("inf")), 0)


@triton.jit
def apply_bitmask(
    logits,
    rows,
    bitmask,
    row_stride,
    bitmask_stride,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """-inf where a bit is 0: nothing is read but the bits. Grid: (n, parts of a row)."""
    index = tl.program_id(0)
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_token = ids < VOCAB
    words = bitmask + index.to(tl.int64) * bitmask_stride + ids // 32
    is_banned = ((tl.load(words, mask=is_token, other=-1) >> (ids % 32)) & 1) == 0
    places = logits + row_of(rows, index) * row_stride + ids
    tl.store(places, tl.full((BLOCK,), -float("inf"), tl.float32), mask=is_token & is_banned)
