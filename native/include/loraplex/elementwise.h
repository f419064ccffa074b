/* What lies between the matrix products: norms, sums, rotation, gates, activations, rows of
 * tables.
 * Arithmetic is float32; results are rounded to the dtype once. */
#ifndef LORAPLEX_ELEMENTWISE_H
#define LORAPLEX_ELEMENTWISE_H

#include "loraplex/abi.h"

#ifdef __cplusplus
extern "C" {
#endif

/* x [num_outer, num_inner, n] -> output, contiguous: x / sqrt(mean(x^2) + eps) * weight. The weight
 * [n] is float32 or has x's dtype, here and in the other norms. */
LORAPLEX_API loraplex_status loraplex_rms_norm(loraplex_pool *pool, int64_t num_outer,
                                               int64_t num_inner, int64_t n, loraplex_dtype dtype,
                                               const void *x, int64_t outer_stride,
                                               int64_t inner_stride, loraplex_dtype weight_dtype,
                                               const void *weight, float eps, void *output);

/* sum = factor * x + residual, rounded; output = rms_norm(sum). All [num_rows, n], results
 * contiguous. */
LORAPLEX_API loraplex_status loraplex_add_rms_norm(
    loraplex_pool *pool, int64_t num_rows, int64_t n, loraplex_dtype dtype, const void *x,
    int64_t x_stride, const void *residual, int64_t residual_stride, float factor,
    loraplex_dtype weight_dtype, const void *weight, float eps, void *output, void *sum);

/* x [num_outer, num_inner, n] -> output, contiguous:
 * (x - mean(x)) / sqrt(variance(x) + eps) * weight + bias. Weight and bias have one dtype;
 * those of inner row i begin at element i * weight_stride. */
LORAPLEX_API loraplex_status loraplex_layer_norm(loraplex_pool *pool, int64_t num_outer,
                                                 int64_t num_inner, int64_t n,
                                                 loraplex_dtype dtype, const void *x,
                                                 int64_t outer_stride, int64_t inner_stride,
                                                 loraplex_dtype weight_dtype, const void *weight,
                                                 const void *bias, int64_t weight_stride,
                                                 float eps, void *output);

/* sum = factor * x + residual, rounded; output = layer_norm(sum). All [num_rows, n], results
 * contiguous. */
LORAPLEX_API loraplex_status loraplex_add_layer_norm(
    loraplex_pool *pool, int64_t num_rows, int64_t n, loraplex_dtype dtype, const void *x,
    int64_t x_stride, const void *residual, int64_t residual_stride, float factor,
    loraplex_dtype weight_dtype, const void *weight, const void *bias, float eps, void *output,
    void *sum);

/* sum = factor * x + residual. All [num_rows, n], the sum contiguous. */
LORAPLEX_API loraplex_status loraplex_add(loraplex_pool *pool, int64_t num_rows, int64_t n,
                                          loraplex_dtype dtype, const void *x, int64_t x_stride,
                                          const void *residual, int64_t residual_stride,
                                          float factor, void *sum);

/* product = x * factor, element by element. All [num_rows, n], the product contiguous. */
LORAPLEX_API loraplex_status loraplex_multiply(loraplex_pool *pool, int64_t num_rows, int64_t n,
                                               loraplex_dtype dtype, const void *x,
                                               int64_t x_stride, const void *factor,
                                               int64_t factor_stride, void *product);

/* x [num_rows, n], in place: factor * x, and where soft_cap is not 0,
 * soft_cap * tanh(factor * x / soft_cap). */
LORAPLEX_API loraplex_status loraplex_scale(loraplex_pool *pool, int64_t num_rows, int64_t n,
                                            loraplex_dtype dtype, float factor, float soft_cap,
                                            void *x, int64_t x_stride);

/* Rotates, in place, the first rotary_dim elements of each head of query [num_tokens, num_heads,
 * head_dim] and key [num_tokens, num_kv_heads, head_dim]: the pairs (i, i + rotary_dim / 2), or
 * (2 i, 2 i + 1) if is_interleaved. A token's heads are contiguous, tokens have a stride.
 * cos, sin [num_tokens, rotary_dim / 2], contiguous. */
LORAPLEX_API loraplex_status loraplex_rotary(loraplex_pool *pool, int64_t num_tokens,
                                             int64_t num_heads, int64_t num_kv_heads,
                                             int64_t head_dim, int64_t rotary_dim,
                                             int32_t is_interleaved, const float *cos,
                                             const float *sin, loraplex_dtype dtype, void *query,
                                             int64_t query_stride, void *key, int64_t key_stride);

typedef int32_t loraplex_activation;
enum {
    LORAPLEX_GELU = 0,      /* x Phi(x), with the normal distribution's Phi */
    LORAPLEX_GELU_TANH = 1, /* the same with tanh in Phi's place */
    LORAPLEX_RELU = 2,
    LORAPLEX_SQUARED_RELU = 3,
    LORAPLEX_SILU = 4, /* x / (1 + e^-x) */
    LORAPLEX_CLAMPED_SWIGLU = 5, /* of loraplex_gate only: (u + 1) g / (1 + e^(-1.702 g)), with
                                    g = min(first half, 7), u = the second half within 7 */
};

/* gate_up [num_rows, 2 n] -> output [num_rows, n], contiguous: activation(first half) * second
 * half. */
LORAPLEX_API loraplex_status loraplex_gate(loraplex_pool *pool, int64_t num_rows, int64_t n,
                                           loraplex_dtype dtype, loraplex_activation activation,
                                           const void *gate_up, int64_t gate_up_stride,
                                           void *output);

/* x [num_rows, n] -> output, contiguous: the activation of each element. */
LORAPLEX_API loraplex_status loraplex_activate(loraplex_pool *pool, int64_t num_rows, int64_t n,
                                               loraplex_dtype dtype,
                                               loraplex_activation activation, const void *x,
                                               int64_t x_stride, void *output);

/* x [num_rows, n] -> output, contiguous: positive x^2 + x / 2 of an element above zero,
 * negative (e^x - 1 - x) + x / 2 of one below. */
LORAPLEX_API loraplex_status loraplex_xielu(loraplex_pool *pool, int64_t num_rows, int64_t n,
                                            loraplex_dtype dtype, float positive, float negative,
                                            const void *x, int64_t x_stride, void *output);

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
