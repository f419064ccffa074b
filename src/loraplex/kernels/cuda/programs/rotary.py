"""Rotary position embedding of queries and keys, in place."""

import triton
import triton.language as tl


@triton.jit
def _turn(
    heads,
    cos,
    sin,
    first_head,
    head_stride,
    NUM_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Rotate a token's heads from first_head on, at `heads`. cos, sin [1, BLOCK]."""
    which = first_head + tl.arange(0, HEADS)
    dims = tl.arange(0, BLOCK)
    inside = (which < NUM_HEADS)[:, None] & (dims < HALF)[None, :]
    places = heads + (which * head_stride)[:, None] + dims[None, :]
    stored_first = tl.load(places, mask=inside)
    first, second = stored_first.to(tl.float32), tl.load(places + HALF, mask=inside).to(tl.float32)
    turned_first = first * cos - second * sin
    turned_second = second * cos + first * sin
    tl.store(places, turned_first.to(stored_first.dtype), mask=inside)
    tl.store(places + HALF, turned_second.to(stored_first.dtype), mask=inside)


@triton.jit
def rotary(
    query,
    key,
    cos,
    sin,
    query_stride,
    query_head_stride,
    key_stride,
    key_head_stride,
    angle_stride,
    NUM_QUERY_HEADS: tl.constexpr,
    NUM_KEY_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid: (tokens, groups of HEADS query heads, then groups of HEADS key heads)."""
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    query_groups: tl.constexpr = (NUM_QUERY_HEADS + HEADS - 1) // HEADS
    dims = tl.arange(0, BLOCK)
    angles = token * angle_stride + dims
    cosines = tl.load(cos + angles, mask=dims < HALF, other=0.0)[None, :]
    sines = tl.load(sin + angles, mask=dims < HALF, other=0.0)[None, :]
    if group < query_groups:
        heads = query + token * query_stride
        first = group * HEADS
        _turn(heads, cosines, sines, first, query_head_stride, NUM_QUERY_HEADS, HALF, HEADS, BLOCK)
    else:
        heads = key + token * key_stride
        first = (group - query_groups) * HEADS
        _turn(heads, cosines, sines, first, key_head_stride, NUM_KEY_HEADS, HALF, HEADS, BLOCK)
