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
    IS_INTERLEAVED: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Rotate a token's heads from first_head on, at `heads`. cos, sin [1, BLOCK]."""
    which = first_head + tl.arange(0, HEADS)
    starts = heads + (which * head_stride)[:, None]
    is_head = (which < NUM_HEADS)[:, None]
    if IS_INTERLEAVED:
        # Pairs lie side by side: they are loaded and stored whole, so that accesses are wide.
        dims = tl.arange(0, 2 * BLOCK)[None, :]
        inside = is_head & (dims < 2 * HALF)
        stored = tl.load(starts + dims, mask=inside, other=0.0)
        first, second = tl.split(tl.reshape(stored.to(tl.float32), (HEADS, BLOCK, 2)))
        turned = tl.join(first * cos - second * sin, second * cos + first * sin)
        turned = tl.reshape(turned, (HEADS, 2 * BLOCK)).to(stored.dtype)
        tl.store(starts + dims, turned, mask=inside)
    else:
        dims = tl.arange(0, BLOCK)[None, :]
        inside = is_head & (dims < HALF)
        stored = tl.load(starts + dims, mask=inside)
        first = stored.to(tl.float32)
        second = tl.load(starts + HALF + dims, mask=inside).to(tl.float32)
        turned_first = (first * cos - second * sin).to(stored.dtype)
        turned_second = (second * cos + first * sin).to(stored.dtype)
        tl.store(starts + dims, turned_first, mask=inside)
        tl.store(starts + HALF + dims, turned_second, mask=inside)


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
    IS_INTERLEAVED: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid: (tokens, groups of HEADS query heads, then groups of HEADS key heads).

    Of a head the first 2 * HALF numbers turn.
    """
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    query_groups: tl.constexpr = (NUM_QUERY_HEADS + HEADS - 1) // HEADS
    dims = tl.arange(0, BLOCK)
    angles = token * angle_stride + dims
    cosines = tl.load(cos + angles, mask=dims < HALF, other=0.0)[None, :]
    sines = tl.load(sin + angles, mask=dims < HALF, other=0.0)[None, :]
    if group < query_groups:
        _turn(
            *(query + token * query_stride, cosines, sines, group * HEADS, query_head_stride),
            *(NUM_QUERY_HEADS, HALF, IS_INTERLEAVED, HEADS, BLOCK),
        )
    else:
        _turn(
            *(key + token * key_stride, cosines, sines, (group - query_groups) * HEADS),
            *(key_head_stride, NUM_KEY_HEADS, HALF, IS_INTERLEAVED, HEADS, BLOCK),
        )
