/* Latent attention, absorbed: one key head for all query heads, whose values are its first part.
 *
 * The storage of one layer is [num_blocks, block_size, L + R]: of each position the latent vector
 * [L], which keys and values of all heads are made of, and the key [R] that turns. */
#ifndef LORAPLEX_LATENT_H
#define LORAPLEX_LATENT_H

#include "loraplex/attention.h"
#include "loraplex/lora.h"

#ifdef __cplusplus
extern "C" {
#endif

/* latent [num_tokens, latent_size] and key [num_tokens, key_size] to the slots (block * block_size +
 * offset) of slot_mapping. */
LORAPLEX_API loraplex_status loraplex_write_latent(
    loraplex_pool *pool, int64_t num_tokens, int64_t latent_size, int64_t key_size,
    const int64_t *slot_mapping, loraplex_dtype dtype, const void *latent, int64_t latent_stride,
    const void *key, int64_t key_stride, loraplex_dtype stored_dtype, void *stored);

/* Causal attention, whose sums are float32: a score is scale * (query . latent + query_key . key),
 * and the values are the latent vectors. step: of one key head of size L + R, without a window,
 * a cap or slopes; L is latent_size. query [num_tokens, num_heads, L], contiguous; query_key
 * [num_tokens, num_heads, R], whose tokens and heads have strides; output as query. */
LORAPLEX_API loraplex_status loraplex_latent_attention(
    loraplex_pool *pool, const loraplex_attention_step *step, int64_t latent_size,
    loraplex_dtype stored_dtype, const void *stored, loraplex_dtype dtype, const void *query,
    const void *query_key, int64_t query_key_stride, int64_t query_key_head_stride, void *output);

/* One of the two places in which adapters change a layer whose heads are taken apart: each head has
 * key_size outputs, then value_size. Its cell of the table is `module`, of a table of one layer. */
typedef struct loraplex_heads_place {
    int64_t module;
    int64_t num_heads;
    int64_t key_size;
    int64_t value_size;
    int64_t latent_size; /* in_features of the layer */
    int64_t is_of_keys;
} loraplex_heads_place;

/* y [num_tokens, num_heads, out], contiguous, += scale * the product of x [num_tokens, num_heads, in]
 * with two matrices. Of keys they are B's rows of the head's keys [key_size, rank], then A
 * [rank, latent_size]; of values A, then B's rows of the head's values. Sums are float32. */
LORAPLEX_API loraplex_status loraplex_add_heads_lora(
    loraplex_pool *pool, const loraplex_lora_step *step, const loraplex_heads_place *place,
    loraplex_dtype dtype, const void *x, int64_t x_stride, int64_t x_head_stride, void *y);

/* output, contiguous = x [num_tokens, num_heads, size], plus what the step's vectors of the module
 * give for it: scale * (factor * x + shift). Keys have no shift: it would change no weight. */
LORAPLEX_API loraplex_status loraplex_scale_heads(
    loraplex_pool *pool, const loraplex_lora_step *step, const loraplex_heads_place *place,
    int64_t num_tokens, loraplex_dtype dtype, const void *x, int64_t x_stride,
    int64_t x_head_stride, void *output);

#ifdef __cplusplus
}
#endif

#endif
