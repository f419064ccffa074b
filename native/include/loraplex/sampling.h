/* From logits to tokens. Rows of logits [any, n], float32 unless an op says otherwise, are named by
 * their numbers in `rows` [num_rows], and have a stride. Results depend on the row's own values only.
 *
 * Of two floats the larger is the more likely; -0 and +0 are equal. Unless an op says otherwise, a
 * row has no NaN, and its largest value is finite.
 */
#ifndef LORAPLEX_SAMPLING_H
#define LORAPLEX_SAMPLING_H

#include "loraplex/abi.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct loraplex_logits {
    const float *values;
    int64_t stride;
    int64_t n;
    int64_t num_rows;
    const int64_t *rows; /* [num_rows] */
} loraplex_logits;

/* The largest value of each of the rows [num_rows] of logits [any, n], which may have any dtype, and
 * where it is: of equal values the first. Any values: with a NaN in it, a row's maximum is NaN. */
LORAPLEX_API loraplex_status loraplex_argmax(loraplex_pool *pool, int64_t num_rows, int64_t n,
                                             loraplex_dtype dtype, const void *logits,
                                             int64_t stride, const int64_t *rows,
                                             int64_t *indices, float *maxima);

/* What may be drawn: the top_k[r] largest values of row r and those equal to the least of them, or
 * all where top_k[r] is 0 or at least n. Candidates are in rising order of their index; candidate i
 * of row r is indices[r * n + i], scaled[r * n + i] = (value - largest) / temperatures[r], float32.
 * Where all are candidates, indices are not written: they are 0, 1, ... */
LORAPLEX_API loraplex_status loraplex_scale_candidates(loraplex_pool *pool,
                                                       const loraplex_logits *logits,
                                                       const int64_t *top_k,
                                                       const float *temperatures, int64_t *counts,
                                                       int32_t *indices, float *scaled);

/* One index per row, by the inverse of the cumulative distribution.
 *
 * probabilities [num_rows, n] holds exp() of what loraplex_scale_candidates gave, in [0, 1] and with
 * a 1 in each row; counts, indices and n are those of that call. A candidate's weight is the whole
 * part of probability * 2^40; sums of weights are exact. Two filters, one after the other:
 * - top_p < 1: the smallest set of largest weights whose sum is at least top_p * (sum of all); of
 *   equal weights the first stay;
 * - min_p > 0: those that weigh at least min_p * (largest weight).
 * uniforms[r] in [0, 1): the first candidate with more than uniform * (sum of what stayed) up to it
 * and with it. Products are float64. */
LORAPLEX_API loraplex_status loraplex_draw(loraplex_pool *pool, int64_t num_rows, int64_t n,
                                           const int64_t *counts, const int32_t *indices,
                                           const float *probabilities, const double *top_p,
                                           const double *min_p, const double *uniforms,
                                           int64_t *drawn);

/* Natural log probabilities. Per row: of the value at chosen[r], how many values are larger than it
 * plus 1, and of the num_top largest values, which come in falling order, equal ones by rising
 * index: top_indices, top_logprobs [num_rows, num_top]; num_top <= n. */
LORAPLEX_API loraplex_status loraplex_top_logprobs(loraplex_pool *pool,
                                                   const loraplex_logits *logits,
                                                   const int64_t *chosen, int64_t num_top,
                                                   float *logprobs, int64_t *ranks,
                                                   int64_t *top_indices, float *top_logprobs);

/* The rows [num_rows], all different, of logits [any, n], in place: -inf where the bit is 0. The bit
 * of index i of row rows[r] is bit i % 32, from the least significant, of words[r * words_stride +
 * i / 32]; bits from n on are not read. */
LORAPLEX_API loraplex_status loraplex_apply_bitmask(loraplex_pool *pool, int64_t num_rows,
                                                    int64_t n, const int64_t *rows,
                                                    const int32_t *words, int64_t words_stride,
                                                    float *logits, int64_t stride);

#ifdef __cplusplus
}
#endif

#endif
