/* Layers with a recurrent state, and what goes with them: the gated delta rule, norms with a gate,
 * the gate of attention's output. */
#ifndef LORAPLEX_RECURRENCE_H
#define LORAPLEX_RECURRENCE_H

#include "loraplex/abi.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Kernels.delta_rule of qkv [num_tokens, 2 * num_keys * key_size + num_values * value_size], and of
 * b and a [num_tokens, num_values], all of the dtype, for rows as in kernels/states.py. Writes
 *
 *   keys    [blocks, num_keys, key_size, block_size]: an order of its own
 *   values  [blocks, block_size, num_values, value_size]
 *   sums    [blocks, block_size, num_values]
 *   states  [blocks, num_values, key_size, value_size]
 *   output  [num_tokens, num_values * value_size], of the dtype, contiguous
 *
 * block_size divides `every`; num_keys divides num_values. */
LORAPLEX_API loraplex_status loraplex_delta_rule(
    loraplex_pool *pool, int64_t num_tokens, int64_t num_rows, int64_t num_keys,
    int64_t num_values, int64_t key_size, int64_t value_size, int64_t every, int64_t block_size,
    loraplex_dtype dtype, const void *qkv, int64_t qkv_stride, const void *b, int64_t b_stride,
    const void *a, int64_t a_stride, const float *a_log, const float *dt_bias,
    const int64_t *query_start_loc, const int64_t *positions, const int64_t *reads,
    const int64_t *writes, const int64_t *places, const int64_t *table_starts,
    const int64_t *tables, float *keys, float *values, float *sums, float *states, void *output);

/* Kernels.ssd of xbc [num_tokens, num_heads * head_size + 2 * num_groups * state_size] and dt
 * [num_tokens, num_heads], both of the dtype, for such rows. Writes
 *
 *   keys    [blocks, num_groups, state_size, block_size]: an order of its own
 *   values  [blocks, block_size, num_heads, head_size]
 *   sums    [blocks, block_size, num_heads]
 *   states  [blocks, num_heads, state_size, head_size]
 *   output  [num_tokens, num_heads * head_size], of the dtype, contiguous
 *
 * rate, dt_bias, skip [num_heads]. block_size divides `every`; num_groups divides num_heads. */
LORAPLEX_API loraplex_status loraplex_ssd(
    loraplex_pool *pool, int64_t num_tokens, int64_t num_rows, int64_t num_heads,
    int64_t head_size, int64_t state_size, int64_t num_groups, int64_t every, int64_t block_size,
    loraplex_dtype dtype, const void *xbc, int64_t xbc_stride, const void *dt, int64_t dt_stride,
    const float *rate, const float *dt_bias, const float *skip, float smallest_step,
    float largest_step, const int64_t *query_start_loc, const int64_t *positions,
    const int64_t *reads, const int64_t *writes, const int64_t *places,
    const int64_t *table_starts, const int64_t *tables, float *keys, float *values, float *sums,
    float *states, void *output);

/* x, gate [num_outer, num_inner, n] -> output, contiguous: the RMS norm of each inner row, rounded,
 * times the weight, rounded. silu(gate), in float32, multiplies x before the norm, or what the
 * weight gave. The weight has x's dtype; that of inner row i begins at element i * weight_stride. */
LORAPLEX_API loraplex_status loraplex_gated_rms_norm(
    loraplex_pool *pool, int64_t num_outer, int64_t num_inner, int64_t n, loraplex_dtype dtype,
    const void *x, int64_t outer_stride, int64_t inner_stride, const void *gate,
    int64_t gate_outer_stride, int64_t gate_inner_stride, const void *weight,
    int64_t weight_stride, float eps, int32_t is_gated_first, void *output);

/* x, gate [num_outer, num_inner, n] -> output, contiguous: x * sigmoid(gate), each rounded. */
LORAPLEX_API loraplex_status loraplex_sigmoid_gate(loraplex_pool *pool, int64_t num_outer,
                                                   int64_t num_inner, int64_t n,
                                                   loraplex_dtype dtype, const void *x,
                                                   int64_t outer_stride, int64_t inner_stride,
                                                   const void *gate, int64_t gate_outer_stride,
                                                   int64_t gate_inner_stride, void *output);

#ifdef __cplusplus
}
#endif

#endif
