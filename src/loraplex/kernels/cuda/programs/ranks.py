"""Adds float32 shares of the same sums, in an order that depends on nothing but their number."""

import triton
import triton.language as tl


@triton.jit
def share_of(places, share: tl.constexpr, share_stride, inside):
    return tl.load(places + share * share_stride, mask=inside, other=0.0)


@triton.jit
def add_shares(
    y,
    shares,
    bias,
    num_columns,
    share_stride,
    row_stride,
    y_stride,
    NUM_SHARES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """y [rows, num_columns] = bias + the sum of shares [NUM_SHARES, rows, num_columns].

    Four shares at a time: (s0 + s1) + (s2 + s3); up to 8 that is kernels.channel.tree_sum's order.
    """
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = n < num_columns
    places = shares + row * row_stride + n
    sums = tl.zeros((BLOCK,), dtype=tl.float32)
    for first in tl.static_range(0, NUM_SHARES, 4):
        four = share_of(places, first, share_stride, inside)
        if first + 1 < NUM_SHARES:
            four += share_of(places, first + 1, share_stride, inside)
        if first + 2 < NUM_SHARES:
            last = share_of(places, first + 2, share_stride, inside)
            if first + 3 < NUM_SHARES:
                last += share_of(places, first + 3, share_stride, inside)
            four += last
        sums = four if first == 0 else sums + four
    if HAS_BIAS:
        sums += tl.load(bias + n, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + row * y_stride + n, sums.to(y.dtype.element_ty), mask=inside)
