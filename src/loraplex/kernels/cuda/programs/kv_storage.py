"""Stores keys and values of a step's tokens in the KV storage, and copies its blocks.

The storage is that of attention_tile.py; int8 is rounded as kernels.ops.to_stored does it.
Blocks are copied by their addresses: many small ones by one launch.
"""

import triton
import triton.language as tl

ROUND_TO_INTEGER: tl.constexpr = tl.constexpr(12582912.0)
"""1.5 * 2 ** 23: adding it to a small float32 leaves no bits after the point, ties go to even."""
SMALLEST_NORMAL: tl.constexpr = tl.constexpr(1.1754943508222875e-38)


@triton.jit
def _store_int8(numbers, scales, vectors, starts, scale_starts, is_head, is_number):
    """Each row of vectors [heads, BLOCK_D] float32, and its scale."""
    largest = tl.max(tl.abs(vectors), 1)
    is_finite = tl.min((tl.abs(vectors) < float("inf")).to(tl.int32), 1) == 1
    scale = tl.div_rn(largest, tl.full(largest.shape, 127.0, tl.float32))
    scale = tl.where(scale < SMALLEST_NORMAL, 0.0, scale)
    scale = tl.where(is_finite, scale, float("nan"))
    has_numbers = scale > 0
    divisors = tl.where(has_numbers, scale, 1.0)
    quotients = tl.where(
        has_numbers[:, None],
        tl.div_rn(vectors, tl.broadcast_to(divisors[:, None], vectors.shape)),
        0.0,
    )
    rounded = (quotients + ROUND_TO_INTEGER) - ROUND_TO_INTEGER
    dims = tl.arange(0, vectors.shape[1])
    tl.store(numbers + starts[:, None] + dims[None, :], rounded.to(tl.int8), mask=is_number)
    tl.store(scales + scale_starts, scale, mask=is_head)


@triton.jit
def _store(
    numbers,
    scales,
    vectors,
    block,
    offset,
    heads,
    K: tl.constexpr,
    D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
):
    dims = tl.arange(0, vectors.shape[1])
    is_head = heads < K
    is_number = is_head[:, None] & (dims < D)[None, :]
    starts = block * BLOCK_STRIDE + (offset * K + heads) * D
    if scales is None:
        stored = vectors.to(numbers.dtype.element_ty)
        tl.store(numbers + starts[:, None] + dims[None, :], stored, mask=is_number)
    else:
        first = block * (BLOCK_STRIDE // 4) + BLOCK_SIZE * K * D // 4
        scale_starts = first + offset * K + heads
        wide = vectors.to(tl.float32)
        _store_int8(numbers, scales, wide, starts, scale_starts, is_head, is_number)


@triton.jit
def write_kv(
    key_numbers,
    value_numbers,
    key_scales,
    value_scales,
    key,
    value,
    slot_mapping,
    key_stride,
    value_stride,
    K: tl.constexpr,
    D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Grid: (tokens, groups of HEADS heads)."""
    token = tl.program_id(0)
    slot = tl.load(slot_mapping + token).to(tl.int64)
    if slot < 0:
        return
    block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    dims = tl.arange(0, BLOCK_D)
    mask = (heads < K)[:, None] & (dims < D)[None, :]
    within = heads[:, None] * D + dims[None, :]
    token = token.to(tl.int64)
    vectors = tl.load(key + token * key_stride + within, mask=mask, other=0.0)
    _store(key_numbers, key_scales, vectors, block, offset, heads, K, D, BLOCK_SIZE, BLOCK_STRIDE)
    vectors = tl.load(value + token * value_stride + within, mask=mask, other=0.0)
    _store(
        value_numbers, value_scales, vectors, block, offset, heads, K, D, BLOCK_SIZE, BLOCK_STRIDE
    )


@triton.jit(do_not_specialize=["num_pairs"])
def copy_blocks(
    rows,
    source_columns,
    target_columns,
    num_pairs,
    WORDS: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """rows [2, num_pairs], columns [num_columns] int64: a block lies at the sum of both, in bytes.

    One program per pair and column. WORDS: int32 of a block. ALIGNMENT: bytes that divide them all.
    """
    pair, column = tl.program_id(0), tl.program_id(1)
    source = tl.load(rows + pair) + tl.load(source_columns + column)
    target = tl.load(rows + num_pairs + pair) + tl.load(target_columns + column)
    sources = source.to(tl.pointer_type(tl.int32))
    targets = target.to(tl.pointer_type(tl.int32))
    for first in range(0, WORDS, BLOCK):
        words = first + tl.arange(0, BLOCK)
        read = tl.multiple_of(sources + words, ALIGNMENT)
        written = tl.multiple_of(targets + words, ALIGNMENT)
        tl.store(written, tl.load(read, mask=words < WORDS), mask=words < WORDS)
