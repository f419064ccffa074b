"""Attention of rows that compute several tokens, in tiles of queries.

A tile is (row, first token in the batch, number of queries, tokens from its first query to the
row's end), four int32. The G query heads of a KV head lie side by side in it: row m of a product is
head m % G of query m // G.
"""

import triton
import triton.language as tl

from loraplex.kernels.cuda.programs.attention_tile import (
    add_tile,
    end_of_keys,
    first_sums,
    terms_by_distance,
    tile_at,
    tiles_to_read,
)


@triton.jit
def load_tile(tiles, index, seq_lens):
    """Row, first token, number of queries and first position of a tile."""
    place = tiles + 4 * index
    row = tl.load(place)
    first_token = tl.load(place + 1).to(tl.int64)
    num_queries = tl.load(place + 2)
    first_position = tl.load(seq_lens + row) - tl.load(place + 3)
    return row, first_token, num_queries, first_position


@triton.jit
def places_of(kv_head, num_queries, BLOCK_M: tl.constexpr, G: tl.constexpr):
    """Per row of a product: its query in the tile, its head, and whether there is one."""
    rows = tl.arange(0, BLOCK_M)
    queries = rows // G
    return queries, kv_head * G + rows % G, queries < num_queries


@triton.jit(do_not_specialize=["table_stride"])
def prefill(
    output,
    query,
    stored,
    rows,
    tiles,
    terms,
    query_stride,
    table_stride,
    S,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """Grid: (tiles, K, parts of a tile): a part has the queries of BLOCK_M rows."""
    kv_head = tl.program_id(1)
    row, first_token, num_queries, first_position = load_tile(
        tiles, tl.program_id(0), rows.seq_lens
    )
    skipped = tl.program_id(2) * (BLOCK_M // S.G)
    if skipped >= num_queries:
        return
    first_token += skipped
    first_position += skipped
    num_queries = tl.minimum(num_queries - skipped, BLOCK_M // S.G)
    end = end_of_keys(first_position, num_queries, tl.load(rows.seq_lens + row), S)
    in_tile, heads, is_row = places_of(kv_head, num_queries, BLOCK_M, S.G)
    dims = tl.arange(0, S.BLOCK_D)
    mask = is_row[:, None] & (dims < S.D)[None, :]
    tokens = first_token + in_tile
    queries = tl.load(
        query + (tokens * query_stride + heads * S.D)[:, None] + dims[None, :], mask=mask, other=0.0
    ).to(COMPUTE)
    table = rows.block_tables + tl.load(rows.table_rows + row).to(tl.int64) * table_stride
    positions = first_position + tl.minimum(in_tile, num_queries - 1)
    num_sink_tiles, first, num_tiles = tiles_to_read(first_position, end, BLOCK_N, S)
    # Tiles that all queries see whole. With a window there are few others: none is singled out.
    num_whole = num_tiles * 0
    if S.WINDOW == 0:
        num_whole = (first_position + 1) // BLOCK_N if S.IS_CAUSAL else end // BLOCK_N
    by_distance = terms_by_distance(terms, heads, is_row, S)
    maxima, sums = first_sums(terms, heads, is_row)
    values = tl.zeros([BLOCK_M, S.BLOCK_D], tl.float32)
    if S.WINDOW == 0:
        for number in range(num_whole):
            maxima, sums, values = add_tile(
                *(maxima, sums, values, queries, positions, by_distance, number, first_position),
                *(end, kv_head, table, stored, S, BLOCK_N, False),
            )
    for number in range(num_whole, num_tiles):
        tile = tile_at(number, num_sink_tiles, first)
        maxima, sums, values = add_tile(
            *(maxima, sums, values, queries, positions, by_distance, tile, first_position),
            *(end, kv_head, table, stored, S, BLOCK_N, True),
        )
    pointers = output + ((tokens * (S.K * S.G) + heads) * S.D)[:, None] + dims[None, :]
    tl.store(pointers, (values / sums[:, None]).to(output.dtype.element_ty), mask=mask)
