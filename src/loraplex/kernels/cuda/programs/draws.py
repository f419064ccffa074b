"""The draw: the inverse of the cumulative distribution of what the cuts have left."""

import triton
import triton.language as tl

from loraplex.kernels.cuda.programs.cuts import WEIGHT_ONE, token_weight
from loraplex.kernels.cuda.programs.logits import maximum_of, row_of


@triton.jit
def _kept_weights(logits, maximum, temperature, limit, min_p, least_weight):
    """int64, 0 for what top-k, min-p, and top-p but for its ties, drop."""
    threshold = min_p * WEIGHT_ONE  # the likeliest token weighs one
    floor = threshold.to(tl.int64)
    floor += (floor.to(tl.float64) < threshold).to(tl.int64)
    weights = token_weight(logits, maximum, temperature)
    is_kept = (logits >= limit) & (weights >= tl.maximum(floor, least_weight))
    return tl.where(is_kept, weights, 0)


@triton.jit
def sum_splits(
    sums,
    ties,
    logits,
    rows,
    temperatures,
    min_ps,
    limits,
    least_weights,
    maxima,
    row_stride,
    VOCAB: tl.constexpr,
    SPLIT: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sum each split: sums [n, splits] int64 of the weights above the least, and the number of
    tokens with the least weight, ties [n, splits] int64. Grid: (n, splits).
    """
    index, split = tl.program_id(0), tl.program_id(1)
    logits += row_of(rows, index) * row_stride
    maximum = maximum_of(maxima, index, NUM_SPLITS, MAX_SPLITS)
    temperature = tl.load(temperatures + index).to(tl.float32)
    min_p, limit = tl.load(min_ps + index), tl.load(limits + index)
    least_weight = tl.load(least_weights + index)
    total = tl.zeros((BLOCK,), tl.int64)
    num_least = tl.zeros((BLOCK,), tl.int64)
    for first in range(0, SPLIT, BLOCK):
        ids = split * SPLIT + first + tl.arange(0, BLOCK)
        found = tl.load(logits + ids, mask=ids < VOCAB, other=-float("inf"))
        weights = _kept_weights(found, maximum, temperature, limit, min_p, least_weight)
        total += tl.where(weights > least_weight, weights, 0)
        num_least += ((weights > 0) & (weights == least_weight)).to(tl.int64)
    place = index.to(tl.int64) * NUM_SPLITS + split
    tl.store(sums + place, tl.sum(total, 0))
    tl.store(ties + place, tl.sum(num_least, 0))


@triton.jit
def draw(
    token_ids,
    sums,
    ties,
    logits,
    rows,
    temperatures,
    min_ps,
    uniforms,
    limits,
    least_weights,
    num_ties,
    maxima,
    row_stride,
    VOCAB: tl.constexpr,
    SPLIT: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """token_ids [n] int64, always ids of the vocabulary. Grid: (n,)."""
    index = tl.program_id(0)
    least_weight, most_ties = tl.load(least_weights + index), tl.load(num_ties + index)
    splits = tl.arange(0, MAX_SPLITS)
    is_split = splits < NUM_SPLITS
    places = index.to(tl.int64) * NUM_SPLITS + splits
    own_ties = tl.load(ties + places, mask=is_split, other=0)
    ties_before = tl.cumsum(own_ties, 0) - own_ties
    # Of the tokens that weigh the least, the first ones stay.
    kept_ties = tl.minimum(tl.maximum(most_ties - ties_before, 0), own_ties)
    own = tl.load(sums + places, mask=is_split, other=0) + kept_ties * least_weight
    cumulative = tl.cumsum(own, 0)
    target = (tl.load(uniforms + index) * tl.sum(own, 0).to(tl.float64)).to(tl.int64)
    split = tl.minimum(tl.sum((cumulative <= target).to(tl.int32), 0), NUM_SPLITS - 1)
    before = tl.sum(tl.where(splits < split, own, 0), 0)
    num_least = tl.sum(tl.where(splits < split, own_ties, 0), 0)

    logits += row_of(rows, index) * row_stride
    maximum = maximum_of(maxima, index, NUM_SPLITS, MAX_SPLITS)
    temperature = tl.load(temperatures + index).to(tl.float32)
    min_p, limit = tl.load(min_ps + index), tl.load(limits + index)
    drawn = tl.full((BLOCK,), VOCAB - 1, tl.int32)
    for first in range(0, SPLIT, BLOCK):
        ids = split * SPLIT + first + tl.arange(0, BLOCK)
        found = tl.load(logits + ids, mask=ids < VOCAB, other=-float("inf"))
        weights = _kept_weights(found, maximum, temperature, limit, min_p, least_weight)
        is_least = (weights > 0) & (weights == least_weight)
        order = num_least + tl.cumsum(is_least.to(tl.int64), 0)
        weights = tl.where(is_least & (order > most_ties), 0, weights)
        is_beyond = before + tl.cumsum(weights, 0) > target
        drawn = tl.minimum(drawn, tl.where(is_beyond, ids, VOCAB - 1))
        before += tl.sum(weights, 0)
        num_least += tl.sum(is_least.to(tl.int64), 0)
    tl.store(token_ids + index, tl.min(drawn, 0).to(tl.int64))
