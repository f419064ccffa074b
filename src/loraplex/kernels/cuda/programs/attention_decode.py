"""Attention of rows that compute one token: their keys are shared out among several programs.

A program of `decode_grouped` or `decode_single` does one row, one KV head and one share of its
keys. Where there are several shares, `merge_shares` adds what they found, in their order.
"""

import triton
import triton.language as tl

from loraplex.kernels.cuda.programs.attention_tile import (
    add_tile,
    finite_or_zero,
    first_sums,
    is_read,
    load_scales,
    load_vectors,
    scores_of,
    terms_by_distance,
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
    """First tile of a share of a row's tiles, and the tile after its last."""
    size = tl.cdiv(num_tiles, num_shares)
    first = tl.minimum(share * size, num_tiles)
    return first, tl.minimum(first + size, num_tiles)


@triton.jit
def _store_sums(
    output, partials, maxima, sums, values, index, token, heads, is_head, share, num_shares, S
):
    """Store the sums of several heads; the output itself if there is one share (no partials)."""
    dims = tl.arange(0, S.BLOCK_D)
    mask = is_head[:, None] & (dims < S.D)[None, :]
    if partials is None:
        pointers = output + (token * (S.K * S.G) + heads)[:, None] * S.D + dims[None, :]
        tl.store(pointers, (values / sums[:, None]).to(output.dtype.element_ty), mask=mask)
    else:
        places = (index.to(tl.int64) * (S.K * S.G) + heads) * num_shares + share
        tl.store(partials.weighted + places[:, None] * S.D + dims[None, :], values, mask=mask)
        tl.store(partials.sums + 2 * places, maxima, mask=is_head)
        tl.store(partials.sums + 2 * places + 1, sums, mask=is_head)


@triton.jit
def _store_zeros(output, token, heads, is_head, S):
    dims = tl.arange(0, S.BLOCK_D)
    mask = is_head[:, None] & (dims < S.D)[None, :]
    pointers = output + (token * (S.K * S.G) + heads)[:, None] * S.D + dims[None, :]
    zeros = tl.zeros([heads.shape[0], S.BLOCK_D], tl.float32)
    tl.store(pointers, zeros.to(output.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["table_stride", "num_shares"])
def decode_grouped(
    output,
    partials,
    query,
    stored,
    rows,
    row_list,
    terms,
    query_stride,
    table_stride,
    num_shares,
    S,
    BLOCK_G: tl.constexpr,
    BLOCK_N: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """Grid: (rows, K, shares). The G query heads of a KV head are the rows of one product."""
    index, kv_head, share = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row, token = _row_and_token(index, row_list)
    end = tl.load(rows.seq_lens + row)
    group = tl.arange(0, BLOCK_G)
    heads, is_head = kv_head * S.G + group, group < S.G
    if end == 0:
        if partials is None:
            _store_zeros(output, token, heads, is_head, S)
        return
    position = end - 1
    num_sink_tiles, first, num_tiles = tiles_to_read(position, end, BLOCK_N, S)
    first_tile, end_tile = _share(share, num_shares, num_tiles)
    if first_tile >= end_tile:
        return
    dims = tl.arange(0, S.BLOCK_D)
    queries = tl.load(
        query + token * query_stride + heads[:, None] * S.D + dims[None, :],
        mask=is_head[:, None] & (dims < S.D)[None, :],
        other=0.0,
    ).to(COMPUTE)
    table = rows.block_tables + tl.load(rows.table_rows + row).to(tl.int64) * table_stride
    positions = tl.full([BLOCK_G], 0, tl.int32) + position
    by_distance = terms_by_distance(terms, heads, is_head, S)
    maxima, sums = first_sums(terms, heads, is_head & (share == 0))
    values = tl.zeros([BLOCK_G, S.BLOCK_D], tl.float32)
    for number in range(first_tile, end_tile):
        tile = tile_at(number, num_sink_tiles, first)
        maxima, sums, values = add_tile(
            *(maxima, sums, values, queries, positions, by_distance, tile, position, end),
            *(kv_head, table, stored, S, BLOCK_N, True),
        )
    _store_sums(
        *(output, partials, maxima, sums, values),
        *(index, token, heads, is_head, share, num_shares, S),
    )


@triton.jit
def _add_keys(
    maxima, sums, values, queries, by_distance, keys, position, read, head, table, stored, S
):
    """Add key n of a tile to sum n: maxima, sums [N], values [N, BLOCK_D], queries [BLOCK_D]."""
    blocks = tl.load(table + keys // S.BLOCK_SIZE, mask=read, other=0).to(tl.int64)
    at = keys % S.BLOCK_SIZE
    key = load_vectors(stored.key_numbers, blocks, at, read, head, S, True)
    value = load_vectors(stored.value_numbers, blocks, at, read, head, S, True)
    products = tl.sum(key.to(tl.float32) * queries[None, :], 1)
    if stored.key_scales is not None:
        products = products * load_scales(stored.key_scales, blocks, at, read, head, S)
    scores = scores_of(products, by_distance, keys, position, S)
    scores = tl.where(read, scores, float("-inf"))
    joint = tl.maximum(maxima, scores)
    base = finite_or_zero(joint)
    factor = tl.exp2(maxima - base)
    weights = tl.exp2(scores - base)
    sums = sums * factor + weights
    if stored.value_scales is not None:
        weights = weights * load_scales(stored.value_scales, blocks, at, read, head, S)
    values = values * factor[:, None] + weights[:, None] * value.to(tl.float32)
    return joint, sums, values


@triton.jit(do_not_specialize=["table_stride", "num_shares"])
def decode_single(
    output,
    partials,
    query,
    stored,
    rows,
    row_list,
    terms,
    query_stride,
    table_stride,
    num_shares,
    S,
    BLOCK_N: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """Grid: (rows, K, shares). One query head per KV head: no product of matrices.

    Key n of every tile has sums of its own, so nothing is exchanged between threads but the
    product of a query and a key; they are joined after the last tile.
    """
    index, head, share = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row, token = _row_and_token(index, row_list)
    end = tl.load(rows.seq_lens + row)
    one_head = head + tl.arange(0, 1)
    if end == 0:
        if partials is None:
            _store_zeros(output, token, one_head, one_head < S.K, S)
        return
    position = end - 1
    num_sink_tiles, first, num_tiles = tiles_to_read(position, end, BLOCK_N, S)
    first_tile, end_tile = _share(share, num_shares, num_tiles)
    if first_tile >= end_tile:
        return
    dims = tl.arange(0, S.BLOCK_D)
    queries = tl.load(query + token * query_stride + head * S.D + dims, mask=dims < S.D, other=0.0)
    queries = queries.to(tl.float32)
    table = rows.block_tables + tl.load(rows.table_rows + row).to(tl.int64) * table_stride
    in_tile = tl.arange(0, BLOCK_N)
    by_distance = terms_by_distance(terms, head, True, S)
    maxima, sums = first_sums(terms, head + 0 * in_tile, (in_tile == 0) & (share == 0))
    values = tl.zeros([BLOCK_N, S.BLOCK_D], tl.float32)
    for number in tl.range(first_tile, end_tile, num_stages=NUM_STAGES):
        tile = tile_at(number, num_sink_tiles, first)
        keys = tile * BLOCK_N + in_tile
        read = is_read(keys, position, end, S)
        maxima, sums, values = _add_keys(
            *(maxima, sums, values, queries, by_distance, keys, position, read),
            *(head, table, stored, S),
        )
    largest = tl.max(maxima, 0)
    factor = tl.exp2(maxima - tl.where(largest == float("-inf"), 0.0, largest))
    one = tl.zeros([1], tl.float32)
    total = one + tl.sum(sums * factor, 0)
    weighted = tl.sum(values * factor[:, None], 0)[None, :]
    _store_sums(
        *(output, partials, one + largest, total, weighted),
        *(index, token, one_head, one_head < S.K, share, num_shares, S),
    )


@triton.jit(do_not_specialize=["num_shares"])
def merge_shares(
    output,
    partials,
    seq_lens,
    row_list,
    num_shares,
    S,
    BLOCK_N: tl.constexpr,
    MAX_SHARES: tl.constexpr,
    BATCH: tl.constexpr,
):
    """Grid: (rows, K * G). BLOCK_N: that of the program that found the partial sums.

    MAX_SHARES: a power of two, BATCH divides it.
    """
    index, head = tl.program_id(0), tl.program_id(1)
    row, token = _row_and_token(index, row_list)
    end = tl.load(seq_lens + row)
    one_head = head + tl.arange(0, 1)
    if end == 0:
        _store_zeros(output, token, one_head, one_head < S.K * S.G, S)
        return
    _, _, num_tiles = tiles_to_read(end - 1, end, BLOCK_N, S)
    num_used = tl.cdiv(num_tiles, tl.cdiv(num_tiles, num_shares))
    first = (index.to(tl.int64) * (S.K * S.G) + head) * num_shares
    shares = tl.arange(0, MAX_SHARES)
    has_sums = shares < num_used
    maxima = tl.load(partials.sums + 2 * (first + shares), mask=has_sums, other=float("-inf"))
    largest = tl.max(maxima, 0)
    base = tl.where(largest == float("-inf"), 0.0, largest)
    sums = tl.load(partials.sums + 2 * (first + shares) + 1, mask=has_sums, other=0.0)
    total = tl.sum(sums * tl.exp2(maxima - base), 0)
    dims = tl.arange(0, S.BLOCK_D)
    values = tl.zeros([S.BLOCK_D], tl.float32)
    for first_share in range(0, num_used, BATCH):
        batch = first_share + tl.arange(0, BATCH)
        is_used = batch < num_used
        places = first + batch
        factor = tl.exp2(
            tl.load(partials.sums + 2 * places, mask=is_used, other=float("-inf")) - base
        )
        found = tl.load(
            partials.weighted + places[:, None] * S.D + dims[None, :],
            mask=is_used[:, None] & (dims < S.D)[None, :],
            other=0.0,
        )
        values += tl.sum(found * factor[:, None], 0)
    result = (values / total).to(output.dtype.element_ty)
    tl.store(output + (token * (S.K * S.G) + head) * S.D + dims, result, mask=dims < S.D)
