"""Attention of rows that compute one token: their keys are shared out among several programs.

A program of `decode_grouped` or `decode_single` does one row, one KV head and one share of its
keys. Where there are several shares, `merge_shares` adds what they found, in their order.
"""

import triton
import triton.language as tl

from loraplex.kernels.cuda.programs.attention_tile import (
    add_tile,
    finite_or_zero,
    in_powers_of_two,
    is_read,
    load_scales,
    load_vectors,
    tile_at,
    tiles_to_read,
)


@triton.jit
def _row_and_token(index, row_list):
    """row_list [any, 2]: (row, token); None: both are the index."""
    row = index
    token = index
    if row_list is not None:
        row = tl.load(row_list + 2 * index)
        token = tl.load(row_list + 2 * index + 1)
    return row, token.to(tl.int64)


@triton.jit
def _share(share, num_shares, num_tiles):
    """(first tile, tile behind the last) of a share of a row's tiles."""
    size = tl.cdiv(num_tiles, num_shares)
    first = tl.minimum(share * size, num_tiles)
    return first, tl.minimum(first + size, num_tiles)


@triton.jit
def _store_sums(
    output,
    partial_values,
    partial_sums,
    maxima,
    sums,
    values,
    index,
    token,
    heads,
    is_head,
    share,
    num_shares,
    H: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Of several heads; the output itself if there is one share (then there are no partials)."""
    dims = tl.arange(0, BLOCK_D)
    mask = is_head[:, None] & (dims < D)[None, :]
    if partial_values is None:
        pointers = output + (token * H + heads)[:, None] * D + dims[None, :]
        tl.store(pointers, (values / sums[:, None]).to(output.dtype.element_ty), mask=mask)
    else:
        places = (index.to(tl.int64) * H + heads) * num_shares + share
        tl.store(partial_values + places[:, None] * D + dims[None, :], values, mask=mask)
        tl.store(partial_sums + 2 * places, maxima, mask=is_head)
        tl.store(partial_sums + 2 * places + 1, sums, mask=is_head)


@triton.jit
def _store_zeros(
    output, token, heads, is_head, H: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr
):
    dims = tl.arange(0, BLOCK_D)
    mask = is_head[:, None] & (dims < D)[None, :]
    pointers = output + (token * H + heads)[:, None] * D + dims[None, :]
    zeros = tl.zeros([heads.shape[0], BLOCK_D], tl.float32)
    tl.store(pointers, zeros.to(output.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["table_stride", "num_shares"])
def decode_grouped(
    output,
    partial_values,
    partial_sums,
    query,
    key_numbers,
    value_numbers,
    key_scales,
    value_scales,
    seq_lens,
    table_rows,
    block_tables,
    row_list,
    query_stride,
    table_stride,
    num_shares,
    K: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SCALE: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    WINDOW: tl.constexpr,
    NUM_SINKS: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """Grid: (rows, K, shares). The G query heads of a KV head are the rows of one product."""
    index, kv_head, share = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row, token = _row_and_token(index, row_list)
    end = tl.load(seq_lens + row)
    group = tl.arange(0, BLOCK_G)
    heads, is_head = kv_head * G + group, group < G
    if end == 0:
        if partial_values is None:
            _store_zeros(output, token, heads, is_head, K * G, D, BLOCK_D)
        return
    position = end - 1
    num_sink_tiles, first, num_tiles = tiles_to_read(position, end, BLOCK_N, WINDOW, NUM_SINKS)
    first_tile, end_tile = _share(share, num_shares, num_tiles)
    if first_tile >= end_tile:
        return
    dims = tl.arange(0, BLOCK_D)
    queries = tl.load(
        query + token * query_stride + heads[:, None] * D + dims[None, :],
        mask=is_head[:, None] & (dims < D)[None, :],
        other=0.0,
    ).to(COMPUTE)
    table = block_tables + tl.load(table_rows + row).to(tl.int64) * table_stride
    positions = tl.full([BLOCK_G], 0, tl.int32) + position
    maxima = tl.full([BLOCK_G], float("-inf"), tl.float32)
    sums = tl.zeros([BLOCK_G], tl.float32)
    values = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    for number in range(first_tile, end_tile):
        maxima, sums, values = add_tile(
            maxima,
            sums,
            values,
            queries,
            positions,
            tile_at(number, num_sink_tiles, first),
            position,
            end,
            kv_head,
            table,
            key_numbers,
            value_numbers,
            key_scales,
            value_scales,
            K,
            D,
            BLOCK_SIZE,
            BLOCK_STRIDE,
            BLOCK_N,
            BLOCK_D,
            SCALE,
            SOFT_CAP,
            WINDOW,
            NUM_SINKS,
            True,
        )
    _store_sums(
        output,
        partial_values,
        partial_sums,
        maxima,
        sums,
        values,
        index,
        token,
        heads,
        is_head,
        share,
        num_shares,
        K * G,
        D,
        BLOCK_D,
    )


@triton.jit(do_not_specialize=["table_stride", "num_shares"])
def decode_single(
    output,
    partial_values,
    partial_sums,
    query,
    key_numbers,
    value_numbers,
    key_scales,
    value_scales,
    seq_lens,
    table_rows,
    block_tables,
    row_list,
    query_stride,
    table_stride,
    num_shares,
    K: tl.constexpr,
    D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SCALE: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    WINDOW: tl.constexpr,
    NUM_SINKS: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """Grid: (rows, K, shares). One query head per KV head: no product of matrices.

    Key n of every tile has sums of its own, so nothing is exchanged between threads but the
    product of a query and a key; they are joined behind the last tile.
    """
    index, head, share = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row, token = _row_and_token(index, row_list)
    end = tl.load(seq_lens + row)
    one_head = head + tl.arange(0, 1)
    if end == 0:
        if partial_values is None:
            _store_zeros(output, token, one_head, one_head < K, K, D, BLOCK_D)
        return
    position = end - 1
    num_sink_tiles, first, num_tiles = tiles_to_read(position, end, BLOCK_N, WINDOW, NUM_SINKS)
    first_tile, end_tile = _share(share, num_shares, num_tiles)
    if first_tile >= end_tile:
        return
    dims = tl.arange(0, BLOCK_D)
    queries = tl.load(query + token * query_stride + head * D + dims, mask=dims < D, other=0.0)
    queries = queries.to(tl.float32)
    table = block_tables + tl.load(table_rows + row).to(tl.int64) * table_stride
    maxima = tl.full([BLOCK_N], float("-inf"), tl.float32)
    sums = tl.zeros([BLOCK_N], tl.float32)
    values = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    for number in tl.range(first_tile, end_tile, num_stages=NUM_STAGES):
        tile = tile_at(number, num_sink_tiles, first)
        keys = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        read = is_read(keys, position, end, WINDOW, NUM_SINKS)
        blocks = tl.load(table + keys // BLOCK_SIZE, mask=read, other=0).to(tl.int64)
        at = keys % BLOCK_SIZE
        key = load_vectors(key_numbers, blocks, at, read, head, K, D, BLOCK_D, BLOCK_STRIDE, True)
        value = load_vectors(
            value_numbers, blocks, at, read, head, K, D, BLOCK_D, BLOCK_STRIDE, True
        )
        products = tl.sum(key.to(tl.float32) * queries[None, :], 1)
        if key_scales is not None:
            products = products * load_scales(
                key_scales, blocks, at, read, head, K, D, BLOCK_SIZE, BLOCK_STRIDE
            )
        scores = in_powers_of_two(products, SCALE, SOFT_CAP)
        scores = tl.where(read, scores, float("-inf"))
        joint = tl.maximum(maxima, scores)
        base = finite_or_zero(joint)
        factor = tl.exp2(maxima - base)
        weights = tl.exp2(scores - base)
        sums = sums * factor + weights
        if value_scales is not None:
            weights = weights * load_scales(
                value_scales, blocks, at, read, head, K, D, BLOCK_SIZE, BLOCK_STRIDE
            )
        values = values * factor[:, None] + weights[:, None] * value.to(tl.float32)
        maxima = joint
    largest = tl.max(maxima, 0)
    factor = tl.exp2(maxima - tl.where(largest == float("-inf"), 0.0, largest))
    one = tl.zeros([1], tl.float32)
    _store_sums(
        output,
        partial_values,
        partial_sums,
        one + largest,
        one + tl.sum(sums * factor, 0),
        tl.sum(values * factor[:, None], 0)[None, :],
        index,
        token,
        one_head,
        one_head < K,
        share,
        num_shares,
        K,
        D,
        BLOCK_D,
    )


@triton.jit(do_not_specialize=["num_shares"])
def merge_shares(
    output,
    partial_values,
    partial_sums,
    seq_lens,
    row_list,
    num_shares,
    H: tl.constexpr,
    D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MAX_SHARES: tl.constexpr,
    BATCH: tl.constexpr,
    WINDOW: tl.constexpr,
    NUM_SINKS: tl.constexpr,
):
    """Grid: (rows, H). BLOCK_N: that of the program that found the partial sums.

    MAX_SHARES: a power of two, BATCH divides it.
    """
    index, head = tl.program_id(0), tl.program_id(1)
    row, token = _row_and_token(index, row_list)
    end = tl.load(seq_lens + row)
    one_head = head + tl.arange(0, 1)
    if end == 0:
        _store_zeros(output, token, one_head, one_head < H, H, D, BLOCK_D)
        return
    _, _, num_tiles = tiles_to_read(end - 1, end, BLOCK_N, WINDOW, NUM_SINKS)
    num_used = tl.cdiv(num_tiles, tl.cdiv(num_tiles, num_shares))
    first = (index.to(tl.int64) * H + head) * num_shares
    shares = tl.arange(0, MAX_SHARES)
    maxima = tl.load(
        partial_sums + 2 * (first + shares), mask=shares < num_used, other=float("-inf")
    )
    largest = tl.max(maxima, 0)
    base = tl.where(largest == float("-inf"), 0.0, largest)
    sums = tl.load(partial_sums + 2 * (first + shares) + 1, mask=shares < num_used, other=0.0)
    total = tl.sum(sums * tl.exp2(maxima - base), 0)
    dims = tl.arange(0, BLOCK_D)
    values = tl.zeros([BLOCK_D], tl.float32)
    for first_share in range(0, num_used, BATCH):
        batch = first_share + tl.arange(0, BATCH)
        is_used = batch < num_used
        places = first + batch
        factor = tl.exp2(
            tl.load(partial_sums + 2 * places, mask=is_used, other=float("-inf")) - base
        )
        found = tl.load(
            partial_values + places[:, None] * D + dims[None, :],
            mask=is_used[:, None] & (dims < D)[None, :],
            other=0.0,
        )
        values += tl.sum(found * factor[:, None], 0)
    result = (values / total).to(output.dtype.element_ty)
    tl.store(output + (token * H + head) * D + dims, result, mask=dims < D)
