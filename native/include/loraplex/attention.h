/* Attention over paged keys and values.
 *
 * The storage of one layer, in blocks of block_size positions, K key and value heads of size D:
 *
 *   keys    [num_blocks, K, D, block_size]   one position's key is a column: scores of neighbouring
 *                                            positions come out in neighbouring lanes
 *   values  [num_blocks, K, block_size, D]
 *
 * As LORAPLEX_INT8, a head's part of a block is (D + 4) * block_size bytes: the numbers in the order
 * above, then one float32 scale per position, at any alignment. An element is number * scale.
 */
#ifndef LORAPLEX_ATTENTION_H
#define LORAPLEX_ATTENTION_H

#include "loraplex/abi.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Made once per step and kind of layer. Row r computes the tokens query_start_loc[r] to
 * query_start_loc[r + 1] - 1, the last of its seq_lens[r] positions; position p lies in block
 * block_tables[r][p / block_size]. Entries of blocks that no token of the row sees are not read. */
typedef struct loraplex_attention_step {
    int64_t num_rows;
    int64_t num_heads; /* a multiple of num_kv_heads */
    int64_t num_kv_heads;
    int64_t head_dim;
    int64_t block_size;
    int64_t sliding_window; /* a token sees so many positions, its own included; 0: all */
    int64_t num_sink_tokens; /* and so many first ones of its row */
    float scale;
    float soft_cap;            /* 0: none */
    const float *alibi_slopes; /* [num_heads], or null */
    const int64_t *query_start_loc; /* [num_rows + 1] */
    const int64_t *seq_lens;        /* [num_rows] */
    const int64_t *block_tables;    /* [num_rows, block_table_stride] */
    int64_t block_table_stride;
    int64_t is_causal; /* 0: a token sees all seq_lens[r] positions, or those less than
                        * sliding_window away; without a window there may be more tokens */
} loraplex_attention_step;

/* Sums are float32. A score is scale * q.k, then soft_cap * tanh(score / soft_cap) if there is a
 * cap, then + the head's slope * (key position - query position) if there are slopes.
 * sink_logits [num_heads] or null: one more score per head, of no key and no value.
 * position_bias [num_heads, 2 * max_distance + 1] or null: entry max_distance + (key position - query
 * position), which is at least -max_distance and at most max_distance, is added to a score. query and
 * output [num_tokens, num_heads, D], of one dtype; a token's heads are contiguous, tokens have a
 * stride. With queries and storage of bfloat16, LORAPLEX_CPU_AVX512_BF16 rounds the softmax's
 * weights to bfloat16. */
LORAPLEX_API loraplex_status loraplex_paged_attention(
    loraplex_pool *pool, const loraplex_attention_step *step, loraplex_dtype kv_dtype,
    const void *keys, const void *values, const float *sink_logits, const float *position_bias,
    int64_t max_distance, loraplex_dtype dtype,
    const void *query, int64_t query_stride, void *output, int64_t output_stride);

/* key, value [num_tokens, K, D] to the slots (block * block_size + offset) of slot_mapping.
 *
 * As LORAPLEX_INT8, each head of each token has a scale of its own: its largest magnitude / 127, or
 * 0 where this is less than the smallest normal float32, or NaN where an element is not finite. */
LORAPLEX_API loraplex_status loraplex_write_kv(
    loraplex_pool *pool, int64_t num_tokens, int64_t num_kv_heads, int64_t head_dim,
    int64_t block_size, const int64_t *slot_mapping, loraplex_dtype dtype, const void *key,
    int64_t key_stride, const void *value, int64_t value_stride, loraplex_dtype kv_dtype,
    void *keys, void *values);

#ifdef __cplusplus
}
#endif

#endif
