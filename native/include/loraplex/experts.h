/* Layers with experts: a token is computed by a few of many.
 *
 * A token t has num_chosen pairs, p = t * num_chosen + j. What belongs to pairs lies in the order of
 * the pairs. `pairs` are sorted by expert, those of one expert ascending: expert e has
 * pairs[starts[e]] to pairs[starts[e + 1] - 1]. */
#ifndef LORAPLEX_EXPERTS_H
#define LORAPLEX_EXPERTS_H

#include "loraplex/abi.h"
#include "loraplex/linear.h"
#include "loraplex/lora.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef int32_t loraplex_routing_mode;
enum {
    LORAPLEX_ROUTING_SOFTMAX = 0,        /* the largest probabilities, which are the weights */
    LORAPLEX_ROUTING_CHOSEN_SOFTMAX = 1, /* the largest logits; weights: a softmax over these */
    LORAPLEX_ROUTING_SIGMOID = 2,        /* the largest sigmoid + bias; weights: the sigmoids */
    LORAPLEX_ROUTING_SPARSE_MIXER = 3,   /* the largest logit, then the largest of the others;
                                            weights: a softmax over those of its round that have
                                            (largest - s) / max(|s|, largest) <= 2 * jitter */
};

typedef struct loraplex_routing_rules {
    int64_t num_experts;
    int64_t num_chosen;
    int64_t num_groups; /* of neighbouring experts; it divides num_experts */
    int64_t num_chosen_groups;
    double factor; /* of all weights */
    double jitter;
    double sum_floor; /* what the sum is increased by before it divides */
    loraplex_routing_mode mode;
    int32_t normalizes; /* whether a token's weights are divided by their sum */
} loraplex_routing_rules;

/* logits [num_tokens, num_experts], selection_bias [num_experts] or null, expert_factors
 * [num_experts], of the weights, or null -> experts and weights [num_tokens, num_chosen], the best
 * first; pairs [num_tokens * num_chosen], starts [num_experts + 1]. In double precision. Of equal scores the lower expert is chosen, a NaN before
 * all others. With several groups, experts come from the num_chosen_groups with the best expert, in
 * SIGMOID with the best sum of two. The experts of a token are always different and in range. */
LORAPLEX_API loraplex_status loraplex_route(loraplex_pool *pool,
                                            const loraplex_routing_rules *rules,
                                            int64_t num_tokens, loraplex_dtype dtype,
                                            const void *logits, int64_t logits_stride,
                                            const float *selection_bias,
                                            const float *expert_factors, int32_t *experts,
                                            float *weights, int32_t *pairs, int32_t *starts);

/* loraplex_linear of each pair's expert, whose ranks have the same pairs. packed: the packed weights of the experts one after
 * another; bias [num_experts, out_features], or null. Pair p reads row p / pairs_per_row of x, and
 * has row p of y. Bits are those of loraplex_linear with that expert's weight. */
LORAPLEX_API loraplex_status loraplex_grouped_linear(
    loraplex_pool *pool, loraplex_weight_kind kind, int64_t group_size, int64_t num_blocks,
    loraplex_dtype dtype, const void *x, int64_t x_stride, int64_t num_pairs,
    int64_t pairs_per_row, const int32_t *pairs, const int32_t *starts, int64_t num_experts,
    const void *packed, int64_t out_features, int64_t in_features, const float *bias,
    loraplex_channel *channel, void *y, int64_t y_stride);

/* loraplex_add_lora of each pair's expert: module modules[i] + e of the table is that of expert e.
 * The step's rows are tokens; experts has num_chosen for each. Pair p reads row p / pairs_per_row of
 * x, and adds to row p of y. Experts have no vectors. */
LORAPLEX_API loraplex_status loraplex_add_expert_lora(
    loraplex_pool *pool, const loraplex_lora_step *step, const loraplex_lora_linear *linear,
    int64_t layer, int64_t num_experts, int64_t num_chosen, const int32_t *experts,
    loraplex_dtype dtype, const void *x, int64_t x_stride, int64_t pairs_per_row,
    loraplex_channel *channel, void *y, int64_t y_stride);

/* y [num_tokens * num_chosen, n], weights [num_tokens, num_chosen] -> output [num_tokens, n],
 * contiguous: the sum of weights[t][j] * y[t * num_chosen + j] over j in this order, then + shared
 * [num_tokens, n], if it is not null, times 1 / (1 + e^-gate) if shared_gate [num_tokens, 1] is not
 * null either. */
LORAPLEX_API loraplex_status loraplex_combine_experts(
    loraplex_pool *pool, int64_t num_tokens, int64_t num_chosen, int64_t n, loraplex_dtype dtype,
    const float *weights, const void *y, int64_t y_stride, const void *shared,
    int64_t shared_stride, const void *shared_gate, int64_t shared_gate_stride, void *output);

#ifdef __cplusplus
}
#endif

#endif
