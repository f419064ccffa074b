/* What lies between the matrix products: norms, rotation, the gate, activations, rows of tables.
 * Arithmetic is float32; results are rounded to the dtype once. */
#ifndef LORAPLEX_ELEMENTWISE_H
#define LORAPLEX_ELEMENTWISE_H

#include "loraplex/abi.h"

#ifdef __cplusplus
extern "C" {
#endif

/* x [num_outer, num_inner, n] -> output, contiguous: x / sqrt(mean(x^2) + eps) * weight. */
LORAPLEX_API loraplex_status loraplex_rms_norm(loraplex_pool *pool, int64_t num_outer,
                                               int64_t num_inner, int64_t n, loraplex_dtype dtype,
                                               const void *x, int64_t outer_stride,
                                               int64_t inner_stride, const void *weight, float eps,
                                               void *output);

/* sum = x + residual, rounded; output = rms_norm(sum). All [num_rows, n], results contiguous. */
LORAPLEX_API loraplex_status loraplex_add_rms_norm(loraplex_pool *pool, int64_t num_rows, int64_t n,
                                                   loraplex_dtype dtype, const void *x,
                                                   int64_t x_stride, const void *residual,
                                                   int64_t residual_stride, const void *weight,
                                                   float eps, void *output, void *sum);

/* x [num_rows, n] -> output, contiguous: (x - mean(x)) / sqrt(variance(x) + eps) * weight + bias. */
LORAPLEX_API loraplex_status loraplex_layer_norm(loraplex_pool *pool, int64_t num_rows, int64_t n,
                                                 loraplex_dtype dtype, const void *x,
                                                 int64_t x_stride, const void *weight,
                                                 const void *bias, float eps, void *output);

/* sum = x + residual, rounded; output = layer_norm(sum). All [num_rows, n], results contiguous. */
LORAPLEX_API loraplex_status loraplex_add_layer_norm(loraplex_pool *pool, int64_t num_rows,
                                                     int64_t n, loraplex_dtype dtype,
                                                     const void *x, int64_t x_stride,
                                                     const void *residual, int64_t residual_stride,
                                                     const void *weight, const void *bias,
                                                     float eps, void *output, void *sum);

/* Rotates, in place, the pairs (i, i + head_dim / 2) of query [num_tokens, num_heads, head_dim]
 * and key [num_tokens, num_kv_heads, head_dim]: a token's heads are contiguous, tokens have a
 * stride. cos, sin [num_tokens, head_dim / 2], contiguous. */
LORAPLEX_API loraplex_status loraplex_rotary(loraplex_pool *pool, int64_t num_tokens,
                                             int64_t num_heads, int64_t num_kv_heads,
                                             int64_t head_dim, const float *cos, const float *sin,
                                             loraplex_dtype dtype, void *query,
                                             int64_t query_stride, void *key, int64_t key_stride);

/* gate_up [num_rows, 2 n] -> output [num_rows, n], contiguous: silu(first half) * second half. */
LORAPLEX_API loraplex_status loraplex_silu_mul(loraplex_pool *pool, int64_t num_rows, int64_t n,
                                               loraplex_dtype dtype, const void *gate_up,
                                               int64_t gate_up_stride, void *output);

typedef int32_t loraplex_activation;
enum {
    LORAPLEX_GELU = 0,      /* x Phi(x), with the normal distribution's Phi */
    LORAPLEX_GELU_TANH = 1, /* the same with tanh in Phi's place */
    LORAPLEX_RELU = 2,
};

/* x [num_rows, n] -> output, contiguous: the activation of each element. */
LORAPLEX_API loraplex_status loraplex_activate(loraplex_pool *pool, int64_t num_rows, int64_t n,
                                               loraplex_dtype dtype,
                                               loraplex_activation activation, const void *x,
                                               int64_t x_stride, void *output);

/* table [..., n] -> output [num_rows, n], contiguous: row indices[i] of the table, of stride
 * table_stride. The indices are not checked. */
LORAPLEX_API loraplex_status loraplex_take_rows(loraplex_pool *pool, int64_t num_rows, int64_t n,
                                                loraplex_dtype dtype, const void *table,
                                                int64_t table_stride, const int64_t *indices,
                                                void *output);

#ifdef __cplusplus
}
#endif

#endif
