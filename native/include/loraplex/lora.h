/* The low-rank part of fused linear layers: y += scale * (x A^T) B^T, for many adapters at once. */
#ifndef LORAPLEX_LORA_H
#define LORAPLEX_LORA_H

#include "loraplex/abi.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A change of outputs by an adapter in addition to LoRA, such as a bias or DoRA's factor: for its
 * tokens, y += scale * (factor * y + shift) in the columns of a module from `first` on. The factor
 * and the shift are of the pages' dtype; null is zero. */
typedef struct loraplex_output_vector {
    int64_t num_tokens;
    const int64_t *token_indices; /* rows of y */
    const float *token_scales;
    int64_t first;
    int64_t size;
    const void *factor; /* [size] */
    const void *shift;  /* [size] */
} loraplex_output_vector;

/* Made once per step. A group is the tokens that one adapter (an entry of the table) applies to.
 *
 * offsets, ranks and scales are [entries, num_layers, num_modules]. At element offsets[...] of the
 * pages lies A [rank, in_features]; B transposed, [rank, out_features], follows it at once. Rank 0:
 * the adapter leaves the module alone.
 *
 * The groups are cut into waves: in a wave a token occurs once, and waves add up one after
 * another. Wave w is the groups wave_starts[w] to wave_starts[w + 1] - 1.
 *
 * Module m of a layer also has the vectors vector_starts[i] to vector_starts[i + 1] - 1, where i is
 * layer * num_modules + m; vector_starts is null if there are none. They are added before LoRA, in
 * their order, and each is of y as it was before. */
typedef struct loraplex_lora_step {
    const void *pages;
    const int64_t *offsets;
    const int32_t *ranks;
    const float *scales;
    int64_t num_layers;
    int64_t num_modules;
    int64_t num_groups;
    const int64_t *group_entries; /* [num_groups] */
    const int64_t *group_starts;  /* [num_groups + 1], into the two arrays below */
    const int64_t *token_indices; /* rows of x and y */
    const float *token_scales;
    int64_t num_waves;
    const int64_t *wave_starts; /* [num_waves + 1] */
    loraplex_dtype pages_dtype;
    const int64_t *vector_starts; /* [num_layers * num_modules + 1] */
    const loraplex_output_vector *vectors;
} loraplex_lora_step;

/* Linear layers computed as one: module modules[i] of the table writes the columns from
 * out_offsets[i] on, out_features[i] of them. Columns of different modules do not overlap.
 * num_blocks: of inputs, as of the layer (linear.h). */
typedef struct loraplex_lora_linear {
    int64_t in_features;
    int64_t num_blocks;
    int64_t num_modules;
    const int64_t *modules;
    const int64_t *out_offsets;
    const int64_t *out_features;
} loraplex_lora_linear;

/* x and y [tokens, ...] of one dtype. Sums are float32. x A^T is added over blocks and ranks like the
 * product of loraplex_linear; all ranks have the same groups and ranks of adapters. The scale is
 * applied to x A^T; what an adapter gives is rounded to the dtype once, when it is added. */
LORAPLEX_API loraplex_status loraplex_add_lora(loraplex_pool *pool, const loraplex_lora_step *step,
                                               const loraplex_lora_linear *linear, int64_t layer,
                                               loraplex_dtype dtype, const void *x,
                                               int64_t x_stride, loraplex_channel *channel,
                                               void *y, int64_t y_stride);

#ifdef __cplusplus
}
#endif

#endif
