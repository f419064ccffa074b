"""Log probabilities. Sums are float32, over splits that depend on the vocabulary alone."""

import triton
import triton.language as tl

from loraplex.kernels.cuda.programs.logits import maximum_of, ordered, row_of, unordered


@triton.jit
def sum_splits(
    sums,
    ranks,
    logits,
    rows,
    token_ids,
    maxima,
    row_stride,
    VOCAB: tl.constexpr,
    SPLIT: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sum each split: sums [n, splits] float32 of exp(logit - maximum), ranks [n, splits] int64,
    the number of logits above that of token_ids. Grid: (n, splits).
    """
    index, split = tl.program_id(0), tl.program_id(1)
    logits += row_of(rows, index) * row_stride
    chosen = tl.load(logits + tl.load(token_ids + index))
    maximum = maximum_of(maxima, index, NUM_SPLITS, MAX_SPLITS)
    total = tl.zeros((BLOCK,), tl.float32)
    num_above = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, SPLIT, BLOCK):
        ids = split * SPLIT + first + tl.arange(0, BLOCK)
        found = tl.load(logits + ids, mask=ids < VOCAB, other=-float("inf"))
        total += tl.exp(found - maximum)
        num_above += (found > chosen).to(tl.int32)
    place = index.to(tl.int64) * NUM_SPLITS + split
    tl.store(sums + place, tl.sum(total, 0))
    tl.store(ranks + place, tl.sum(num_above, 0).to(tl.int64))


@triton.jit(do_not_specialize=["first_row"])
def order_tokens(
    keys, logits, rows, first_row, row_stride, VOCAB: tl.constexpr, BLOCK: tl.constexpr
):
    """keys [m, VOCAB] int64, all different: ordered as the logits, of equals the lowest id first.

    Of the rows [first_row : first_row + m]. Grid: (m, parts of a row).
    """
    index = tl.program_id(0).to(tl.int64)
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_token = ids < VOCAB
    row = row_of(rows, first_row + index)
    found = tl.load(logits + row * row_stride + ids, mask=is_token, other=0.0)
    own_keys = (ordered(found).to(tl.int64) << 32) + (0x7FFFFFFF - ids)
    tl.store(keys + index * VOCAB + ids, own_keys, mask=is_token)


@triton.jit(do_not_specialize=["num_top"])
def finish(
    logprobs,
    own_ranks,
    top_ids,
    top_logprobs,
    top_keys,
    sums,
    ranks,
    logits,
    rows,
    token_ids,
    maxima,
    num_top,
    row_stride,
    NUM_SPLITS: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """logprobs [n], own_ranks [n] of token_ids; top_ids, top_logprobs [n, num_top] of top_keys."""
    index = tl.program_id(0).to(tl.int64)
    splits = tl.arange(0, MAX_SPLITS)
    is_split = splits < NUM_SPLITS
    places = index * NUM_SPLITS + splits
    log_sum = tl.log(tl.sum(tl.load(sums + places, mask=is_split, other=0.0), 0))
    num_above = tl.sum(tl.load(ranks + places, mask=is_split, other=0), 0)
    maximum = maximum_of(maxima, index, NUM_SPLITS, MAX_SPLITS)
    logits += row_of(rows, index) * row_stride
    chosen = tl.load(logits + tl.load(token_ids + index))
    tl.store(logprobs + index, chosen - maximum - log_sum)
    tl.store(own_ranks + index, num_above + 1)
    for first in range(0, num_top, BLOCK):
        which = first + tl.arange(0, BLOCK)
        places = index * num_top + which
        keys = tl.load(top_keys + places, mask=which < num_top, other=0)
        tl.store(top_ids + places, 0x7FFFFFFF - (keys & 0xFFFFFFFF), mask=which < num_top)
        found = unordered((keys >> 32).to(tl.int32))
        tl.store(top_logprobs + places, found - maximum - log_sum, mask=which < num_top)
