"""Where a row is cut: by top-k at a logit, by top-p at a token weight.

Both need the largest key so that the tokens of this key and above have enough mass. By top-k
the keys are the logits, the mass is the number of tokens; by top-p the keys are the weights, and
so is the mass. Nothing is sorted: `tally` sums the mass above some levels, which shows between
which two the cut is; `gather` lists the logits between them; `cut` bisects the list. All sums are
integers, so their order does not matter.
"""

import triton
import triton.language as tl

from loraplex.kernels.cuda.programs.logits import (
    maximum_of,
    minimum_of,
    ordered,
    row_of,
    unordered,
)

WEIGHT_ONE: tl.constexpr = tl.constexpr(float(2**40))


@triton.jit
def token_weight(logits, maximum, temperature):
    """kernels.sampling.token_weights, int64. No sums: so no compiler fuses it two ways."""
    below_max = logits - maximum
    exponents = tl.div_rn(below_max, tl.broadcast_to(temperature, below_max.shape))
    return (tl.exp(exponents) * WEIGHT_ONE).to(tl.int64)


@triton.jit
def store_weights(
    weights,
    logits,
    temperatures,
    maxima,
    row_stride,
    VOCAB: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """weights [n, VOCAB] int64 of logits [n, VOCAB]. Grid: (n, parts of a row)."""
    index = tl.program_id(0)
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    maximum = maximum_of(maxima, index, NUM_SPLITS, MAX_SPLITS)
    temperature = tl.load(temperatures + index)
    index = index.to(tl.int64)
    found = tl.load(logits + index * row_stride + ids, mask=ids < VOCAB, other=-float("inf"))
    own_weights = token_weight(found, maximum, temperature)
    tl.store(weights + index * VOCAB + ids, own_weights, mask=ids < VOCAB)


@triton.jit
def _keys(logits, maximum, temperature, limit, IS_WEIGHTED: tl.constexpr):
    """int64. What top-k has dropped, below the limit, weighs nothing."""
    if IS_WEIGHTED:
        kept = tl.where(logits >= limit, logits, -float("inf"))
        return token_weight(kept, maximum, temperature)
    else:
        return ordered(logits).to(tl.int64)


@triton.jit
def _is_cut(bound, IS_WEIGHTED: tl.constexpr):
    """bound: top_p, or top_k."""
    if IS_WEIGHTED:
        return bound < 1.0
    else:
        return bound > 0.0


@triton.jit
def _parameters(
    maxima, temperatures, limits, index, NUM_SPLITS: tl.constexpr, MAX_SPLITS: tl.constexpr
):
    """(maximum, temperature, limit) of a row."""
    return (
        maximum_of(maxima, index, NUM_SPLITS, MAX_SPLITS),
        tl.load(temperatures + index).to(tl.float32),
        tl.load(limits + index),
    )


@triton.jit
def _levels(maximum, minimum, temperature, LEVELS: tl.constexpr, IS_WEIGHTED: tl.constexpr):
    """Keys [LEVELS] that fall: of evenly spaced logits, and last one below all that can matter."""
    which = tl.arange(0, LEVELS)
    spaced = maximum - (maximum - minimum) * ((which + 1).to(tl.float32) / LEVELS)
    levels = _keys(spaced, maximum, temperature, -float("inf"), IS_WEIGHTED)
    if IS_WEIGHTED:
        return tl.where(which == LEVELS - 1, 1, tl.maximum(levels, 1))
    else:
        return tl.where(which == LEVELS - 1, -0x80000000, levels)


@triton.jit
def tally(
    levels,
    masses,
    counts,
    logits,
    rows,
    bounds,
    temperatures,
    limits,
    maxima,
    minima,
    row_stride,
    VOCAB: tl.constexpr,
    SPLIT: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    LEVELS: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_WEIGHTED: tl.constexpr,
):
    """What is at or above levels [n, LEVELS] int64, which the first split chooses.

    masses [n, splits, LEVELS] int64, counts [n, splits, LEVELS] int32. Grid: (n, splits).
    """
    index, split = tl.program_id(0), tl.program_id(1)
    if not _is_cut(tl.load(bounds + index), IS_WEIGHTED):
        return
    logits += row_of(rows, index) * row_stride
    maximum, temperature, limit = _parameters(
        maxima, temperatures, limits, index, NUM_SPLITS, MAX_SPLITS
    )
    minimum = minimum_of(minima, index, NUM_SPLITS, MAX_SPLITS)
    own_levels = _levels(maximum, minimum, temperature, LEVELS, IS_WEIGHTED)
    offsets = tl.arange(0, BLOCK)
    count = tl.zeros((BLOCK, LEVELS), tl.int32)
    mass = tl.zeros((BLOCK, LEVELS), tl.int64)
    for first in range(0, SPLIT, BLOCK):
        ids = split * SPLIT + first + offsets
        is_token = ids < VOCAB
        found = tl.load(logits + ids, mask=is_token, other=-float("inf"))
        keys = _keys(found, maximum, temperature, limit, IS_WEIGHTED)
        is_above = is_token[:, None] & (keys[:, None] >= own_levels[None, :])
        count += is_above.to(tl.int32)
        if IS_WEIGHTED:
            mass += tl.where(is_above, keys[:, None], 0)
    which = tl.arange(0, LEVELS)
    above = tl.sum(count, 0)
    places = (index.to(tl.int64) * NUM_SPLITS + split) * LEVELS + which
    tl.store(counts + places, above)
    tl.store(masses + places, tl.sum(mass, 0) if IS_WEIGHTED else above.to(tl.int64))
    if split == 0:
        tl.store(levels + index.to(tl.int64) * LEVELS + which, own_levels)


@triton.jit
def _interval(
    levels,
    masses,
    counts,
    index,
    bound,
    NUM_SPLITS: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    LEVELS: tl.constexpr,
    IS_WEIGHTED: tl.constexpr,
):
    """Interval of keys with the cut: (low, high, mass at or above high, wanted mass, counts).

    counts [MAX_SPLITS] int32: the tokens of each split with low <= key < high.
    """
    which, splits = tl.arange(0, LEVELS), tl.arange(0, MAX_SPLITS)
    index = index.to(tl.int64)
    places = (index * NUM_SPLITS + splits)[:, None] * LEVELS + which[None, :]
    is_split = (splits < NUM_SPLITS)[:, None]
    masses_above = tl.sum(tl.load(masses + places, mask=is_split, other=0), 0)
    counts_above = tl.load(counts + places, mask=is_split, other=0)
    if IS_WEIGHTED:
        wanted = bound * tl.max(masses_above, 0).to(tl.float64)
        ceiling = tl.full((), 2**40 + 1, tl.int64)
    else:
        wanted = bound
        ceiling = tl.full((), 2**31, tl.int64)
    chosen = tl.sum((masses_above.to(tl.float64) < wanted).to(tl.int32), 0)
    chosen = tl.minimum(chosen, LEVELS - 1)
    is_low, is_high = which == chosen, which == chosen - 1
    own_levels = tl.load(levels + index * LEVELS + which)
    low = tl.sum(tl.where(is_low, own_levels, 0), 0)
    high = tl.where(chosen > 0, tl.sum(tl.where(is_high, own_levels, 0), 0), ceiling)
    mass = tl.sum(tl.where(is_high, masses_above, 0), 0)
    difference = is_low.to(tl.int32) - is_high.to(tl.int32)
    return low, high, mass, wanted, tl.sum(counts_above * difference[None, :], 1)


@triton.jit
def gather(
    listed,
    levels,
    masses,
    counts,
    logits,
    rows,
    bounds,
    temperatures,
    limits,
    maxima,
    row_stride,
    VOCAB: tl.constexpr,
    SPLIT: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    LEVELS: tl.constexpr,
    CAPACITY: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_WEIGHTED: tl.constexpr,
):
    """listed [n, CAPACITY]: the logits that the cut is among, if they fit. Grid: (n, splits)."""
    index, split = tl.program_id(0), tl.program_id(1)
    bound = tl.load(bounds + index)
    if not _is_cut(bound, IS_WEIGHTED):
        return
    low, high, _, _, inside = _interval(
        levels, masses, counts, index, bound, NUM_SPLITS, MAX_SPLITS, LEVELS, IS_WEIGHTED
    )
    if tl.sum(inside, 0) > CAPACITY:
        return
    logits += row_of(rows, index) * row_stride
    maximum, temperature, limit = _parameters(
        maxima, temperatures, limits, index, NUM_SPLITS, MAX_SPLITS
    )
    place = tl.sum(tl.where(tl.arange(0, MAX_SPLITS) < split, inside, 0), 0)
    listed += index.to(tl.int64) * CAPACITY
    for first in range(0, SPLIT, BLOCK):
        ids = split * SPLIT + first + tl.arange(0, BLOCK)
        is_token = ids < VOCAB
        found = tl.load(logits + ids, mask=is_token, other=-float("inf"))
        keys = _keys(found, maximum, temperature, limit, IS_WEIGHTED)
        is_inside = is_token & (keys >= low) & (keys < high)
        order = tl.cumsum(is_inside.to(tl.int32), 0)
        tl.store(listed + place + order - 1, found, mask=is_inside)
        place += tl.max(order, 0)


@triton.jit
def _mass_between(
    source,
    length,
    low,
    high,
    maximum,
    temperature,
    limit,
    BLOCK: tl.constexpr,
    IS_WEIGHTED: tl.constexpr,
):
    """Mass of the logits source[:length] with low <= key < high."""
    mass = tl.zeros((BLOCK,), tl.int64)
    for first in range(0, length, BLOCK):
        places = first + tl.arange(0, BLOCK)
        is_token = places < length
        found = tl.load(source + places, mask=is_token, other=-float("inf"))
        keys = _keys(found, maximum, temperature, limit, IS_WEIGHTED)
        is_inside = is_token & (keys >= low) & (keys < high)
        if IS_WEIGHTED:
            mass += tl.where(is_inside, keys, 0)
        else:
            mass += is_inside.to(tl.int64)
    return tl.sum(mass, 0)


@triton.jit
def _num_ties(mass, key, wanted, most):
    """The least n so that mass + n * key is enough: 1 <= n <= most."""
    too_few, enough = tl.zeros((), tl.int64), tl.full((), most, tl.int64)
    while enough - too_few > 1:
        middle = too_few + (enough - too_few) // 2
        is_enough = (mass + middle * key).to(tl.float64) >= wanted
        enough = tl.where(is_enough, middle, enough)
        too_few = tl.where(is_enough, too_few, middle)
    return enough


@triton.jit
def cut(
    limits,
    least_weights,
    num_ties,
    listed,
    levels,
    masses,
    counts,
    logits,
    rows,
    bounds,
    temperatures,
    maxima,
    row_stride,
    VOCAB: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    LEVELS: tl.constexpr,
    CAPACITY: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_WEIGHTED: tl.constexpr,
):
    """Cut by top-k: limits [n] float32, the least logit that stays. Grid: (n,).

    Cut by top-p: least_weights [n] int64, the least that stays, and num_ties [n] int64, how many
    tokens of this weight do. What does not cut leaves its arrays as they are.
    """
    index = tl.program_id(0)
    bound = tl.load(bounds + index)
    if not _is_cut(bound, IS_WEIGHTED):
        return
    low, high, above, wanted, inside = _interval(
        levels, masses, counts, index, bound, NUM_SPLITS, MAX_SPLITS, LEVELS, IS_WEIGHTED
    )
    maximum, temperature, limit = _parameters(
        maxima, temperatures, limits, index, NUM_SPLITS, MAX_SPLITS
    )
    length = tl.sum(inside, 0)
    source = listed + index.to(tl.int64) * CAPACITY
    if length > CAPACITY:
        source = logits + row_of(rows, index) * row_stride
        length = tl.full((), VOCAB, tl.int32)
    too_high = high
    while too_high - low > 1:
        middle = low + (too_high - low) // 2
        mass = above + _mass_between(
            source, length, middle, high, maximum, temperature, limit, BLOCK, IS_WEIGHTED
        )
        is_enough = mass.to(tl.float64) >= wanted
        low = tl.where(is_enough, middle, low)
        too_high = tl.where(is_enough, too_high, middle)
    if IS_WEIGHTED:
        more = above + _mass_between(
            source, length, low + 1, high, maximum, temperature, limit, BLOCK, IS_WEIGHTED
        )
        tl.store(least_weights + index, low)
        tl.store(num_ties + index, _num_ties(more, low, wanted, VOCAB))
    else:
        tl.store(limits + index, unordered(low.to(tl.int32)))
