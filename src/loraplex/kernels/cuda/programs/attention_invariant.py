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
    end_of_keys,
    first_sums,
    fold,
    terms_by_distance,
    tile_at,
    tiles_to_read,
)


@triton.jit
def _chunk_sums(
    number,
    num_sink_chunks,
    first,
    queries,
    positions,
    by_distance,
    first_position,
    end,
    kv_head,
    table,
    stored,
    S,
    CHUNK: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Sums over the keys of the chunk that is read as number `number`, and of nothing else."""
    first_tile = tile_at(number, num_sink_chunks, first) * (CHUNK // BLOCK_N)
    end_tile = tl.minimum(first_tile + CHUNK // BLOCK_N, tl.cdiv(end, BLOCK_N))
    maxima = tl.full(positions.shape, float("-inf"), tl.float32)
    sums = tl.zeros(positions.shape, tl.float32)
    values = tl.zeros(queries.shape, tl.float32)
    for tile in range(first_tile, end_tile):
        maxima, sums, values = add_tile(
            *(maxima, sums, values, queries, positions, by_distance, tile),
            *(first_position, end, kv_head, table, stored, S, BLOCK_N, True),
        )
    return maxima, sums, values


@triton.jit(do_not_specialize=["table_stride", "num_shares", "chunks_per_program"])
def attend_chunks(
    output,
    partials,
    query,
    stored,
    rows,
    tiles,
    terms,
    query_stride,
    table_stride,
    num_shares,
    chunks_per_program,
    S,
    CHUNK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """Grid: (tiles, K, shares). Tiles are those of attention_prefill.py.

    CHUNK: keys, a multiple of BLOCK_N. With one share the output is written. With several, tiles
    have one query each, and a share is one chunk: its sums are written.
    """
    kv_head, share = tl.program_id(1), tl.program_id(2)
    row, first_token, num_queries, first_position = load_tile(
        tiles, tl.program_id(0), rows.seq_lens
    )
    end = end_of_keys(first_position, num_queries, tl.load(rows.seq_lens + row), S)
    in_tile, heads, is_row = places_of(kv_head, num_queries, BLOCK_M, S.G)
    num_sink_chunks, first, num_chunks = tiles_to_read(first_position, end, CHUNK, S)
    first_chunk = share * chunks_per_program
    end_chunk = tl.minimum(first_chunk + chunks_per_program, num_chunks)
    if (share > 0) & (first_chunk >= end_chunk):
        return
    dims = tl.arange(0, S.BLOCK_D)
    mask = is_row[:, None] & (dims < S.D)[None, :]
    tokens = first_token + in_tile
    queries = tl.load(
        query + (tokens * query_stride + heads * S.D)[:, None] + dims[None, :], mask=mask, other=0.0
    ).to(COMPUTE)
    table = rows.block_tables + tl.load(rows.table_rows + row).to(tl.int64) * table_stride
    positions = first_position + tl.minimum(in_tile, num_queries - 1)
    by_distance = terms_by_distance(terms, heads, is_row, S)
    maxima, sums = first_sums(terms, heads, is_row & (num_shares == 1))
    values = tl.zeros([BLOCK_M, S.BLOCK_D], tl.float32)
    for number in range(first_chunk, end_chunk):
        chunk_maxima, chunk_sums, chunk_values = _chunk_sums(
            *(number, num_sink_chunks, first, queries, positions, by_distance, first_position, end),
            *(kv_head, table, stored, S, CHUNK, BLOCK_N),
        )
        maxima, sums, values = fold(maxima, sums, values, chunk_maxima, chunk_sums, chunk_values)
    if num_shares == 1:
        total = tl.where(end > 0, sums, 1.0)
        pointers = output + ((tokens * (S.K * S.G) + heads) * S.D)[:, None] + dims[None, :]
        tl.store(pointers, (values / total[:, None]).to(output.dtype.element_ty), mask=mask)
    else:
        places = (tl.program_id(0).to(tl.int64) * (S.K * S.G) + heads) * num_shares + share
        tl.store(partials.weighted + places[:, None] * S.D + dims[None, :], values, mask=mask)
        tl.store(partials.sums + 2 * places, maxima, mask=is_row)
        tl.store(partials.sums + 2 * places + 1, sums, mask=is_row)


@triton.jit(do_not_specialize=["num_shares"])
def fold_chunks(output, partials, seq_lens, tiles, terms, num_shares, S, CHUNK: tl.constexpr):
    """Grid: (tiles of one query, K * G)."""
    index, head = tl.program_id(0), tl.program_id(1)
    _, token, _, position = load_tile(tiles, index, seq_lens)
    _, _, num_chunks = tiles_to_read(position, position + 1, CHUNK, S)
    first = (index.to(tl.int64) * (S.K * S.G) + head) * num_shares
    dims = tl.arange(0, S.BLOCK_D)
    is_dim = (dims < S.D)[None, :]
    one = tl.arange(0, 1)
    maxima, sums = first_sums(terms, head + one, one == 0)
    values = tl.zeros([1, S.BLOCK_D], tl.float32)
    for chunk in tl.range(0, num_chunks, num_stages=4):
        place = first + chunk + one
        pointers = partials.weighted + place[:, None] * S.D + dims[None, :]
        found = tl.load(pointers, mask=is_dim, other=0.0)
        chunk_maxima = tl.load(partials.sums + 2 * place)
        chunk_sums = tl.load(partials.sums + 2 * place + 1)
        maxima, sums, values = fold(maxima, sums, values, chunk_maxima, chunk_sums, found)
    total = tl.where(position >= 0, sums, 1.0)
    result = (values / total[:, None]).to(output.dtype.element_ty)
    pointers = output + (token * (S.K * S.G) + head) * S.D + dims[None, :] + one[:, None]
    tl.store(pointers, result, mask=is_dim)
