"""Attention whose bits depend on a token's position alone, not on its step.

A token's keys lie in chunks at multiples of a fixed length. What is summed over one chunk starts
from nothing, tile after tile; the chunks' sums are folded in their order. Whether one program folds
them, or `fold_chunks` those of several programs, the operations are the same. Rows of a product do
not know of each other, and a chunk or tile that a token does not see leaves its sums as they are.
Both programs must be compiled without contraction (enable_fp_fusion=False).
"""

import triton
import triton.language as tl

from loraplex.kernels.cuda.programs.attention_prefill import load_tile, places_of
from loraplex.kernels.cuda.programs.attention_tile import (
    add_tile,
    fold,
    tile_at,
    tiles_to_read,
)


@triton.jit(do_not_specialize=["table_stride", "num_shares", "chunks_per_program"])
def attend_chunks(
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
    tiles,
    query_stride,
    table_stride,
    num_shares,
    chunks_per_program,
    K: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SCALE: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    WINDOW: tl.constexpr,
    NUM_SINKS: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """Grid: (tiles, K, shares). Tiles are those of attention_prefill.py.

    CHUNK: keys, a multiple of BLOCK_N. With one share the output is written. With several, tiles
    have one query each, and a share is one chunk: its sums are written.
    """
    kv_head, share = tl.program_id(1), tl.program_id(2)
    row, first_token, num_queries, first_position = load_tile(tiles, tl.program_id(0), seq_lens)
    end = first_position + num_queries
    in_tile, heads, is_row = places_of(kv_head, num_queries, BLOCK_M, G)
    num_sink_chunks, first, num_chunks = tiles_to_read(
        first_position, end, CHUNK, WINDOW, NUM_SINKS
    )
    first_chunk = share * chunks_per_program
    end_chunk = tl.minimum(first_chunk + chunks_per_program, num_chunks)
    if (share > 0) & (first_chunk >= end_chunk):
        return
    dims = tl.arange(0, BLOCK_D)
    mask = is_row[:, None] & (dims < D)[None, :]
    tokens = first_token + in_tile
    queries = tl.load(
        query + (tokens * query_stride + heads * D)[:, None] + dims[None, :], mask=mask, other=0.0
    ).to(COMPUTE)
    table = block_tables + tl.load(table_rows + row).to(tl.int64) * table_stride
    positions = first_position + tl.minimum(in_tile, num_queries - 1)
    maxima = tl.full([BLOCK_M], float("-inf"), tl.float32)
    sums = tl.zeros([BLOCK_M], tl.float32)
    values = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for number in range(first_chunk, end_chunk):
        first_tile = tile_at(number, num_sink_chunks, first) * (CHUNK // BLOCK_N)
        end_tile = tl.minimum(first_tile + CHUNK // BLOCK_N, tl.cdiv(end, BLOCK_N))
        chunk_maxima = tl.full([BLOCK_M], float("-inf"), tl.float32)
        chunk_sums = tl.zeros([BLOCK_M], tl.float32)
        chunk_values = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        for tile in range(first_tile, end_tile):
            chunk_maxima, chunk_sums, chunk_values = add_tile(
                chunk_maxima,
                chunk_sums,
                chunk_values,
                queries,
                positions,
                tile,
                first_position,
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
        maxima, sums, values = fold(maxima, sums, values, chunk_maxima, chunk_sums, chunk_values)
    if num_shares == 1:
        total = tl.where(end > 0, sums, 1.0)
        pointers = output + ((tokens * K * G + heads) * D)[:, None] + dims[None, :]
        tl.store(pointers, (values / total[:, None]).to(output.dtype.element_ty), mask=mask)
    else:
        places = (tl.program_id(0).to(tl.int64) * K * G + heads) * num_shares + share
        tl.store(partial_values + places[:, None] * D + dims[None, :], values, mask=mask)
        tl.store(partial_sums + 2 * places, maxima, mask=is_row)
        tl.store(partial_sums + 2 * places + 1, sums, mask=is_row)


@triton.jit(do_not_specialize=["num_shares"])
def fold_chunks(
    output,
    partial_values,
    partial_sums,
    seq_lens,
    tiles,
    num_shares,
    H: tl.constexpr,
    D: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WINDOW: tl.constexpr,
    NUM_SINKS: tl.constexpr,
):
    """Grid: (tiles of one query, H)."""
    index, head = tl.program_id(0), tl.program_id(1)
    _, token, _, position = load_tile(tiles, index, seq_lens)
    _, _, num_chunks = tiles_to_read(position, position + 1, CHUNK, WINDOW, NUM_SINKS)
    first = (index.to(tl.int64) * H + head) * num_shares
    dims = tl.arange(0, BLOCK_D)
    maxima = tl.full([1], float("-inf"), tl.float32)
    sums = tl.zeros([1], tl.float32)
    values = tl.zeros([1, BLOCK_D], tl.float32)
    one = tl.arange(0, 1)
    for chunk in tl.range(0, num_chunks, num_stages=4):
        place = first + chunk + one
        found = tl.load(
            partial_values + place[:, None] * D + dims[None, :], mask=(dims < D)[None, :], other=0.0
        )
        maxima, sums, values = fold(
            maxima,
            sums,
            values,
            tl.load(partial_sums + 2 * place),
            tl.load(partial_sums + 2 * place + 1),
            found,
        )
    total = tl.where(position >= 0, sums, 1.0)
    result = (values / total[:, None]).to(output.dtype.element_ty)
    pointers = output + (token * H + head) * D + dims[None, :] + one[:, None]
    tl.store(pointers, result, mask=(dims < D)[None, :])
